"""Flower's client, imported by its actors: a process each, which keep the data."""

import functools

import contest
import torch
import torch_parts
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
job = contest.job()
torch.set_num_threads(job.threads)
load = functools.cache(lambda: contest.load(job))
network = functools.cache(torch_parts.network)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received network on the client's samples."""
    x, y, _, _ = load()
    client = int(context.node_config["partition-id"])
    network().load_state_dict(message.content["arrays"].to_torch_state_dict())
    torch_parts.train_client(network(), job, x[client], y[client])
    reply = RecordDict(
        {
            "arrays": ArrayRecord(network().state_dict()),
            "metrics": MetricRecord({"num-examples": len(y[client])}),
        }
    )
    return Message(content=reply, reply_to=message)
