"""The hash of random keys in Python: compiled programs call it, so they need not contain it. The bits are those of JAX.

JAX writes the hash out at every place where a program folds, splits or draws, which is a fourth of the time to compile
a round of a small network. `tests/test_threefry.py` compares both.
"""

import ctypes
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

from fedjax_mr.keys import threefry

NAME = "fedjax_mr_threefry2x32"
FEW = 8  # words that Python hashes sooner one by one than NumPy does all at once
MOST_KEPT, MOST_KEPT_WORDS = 50_000, 256  # results, and words of each: tests compute many rounds several times
MANY = 2**14  # words at a time, so that what NumPy computes in between stays in the cache


kept = {}  # bytes of four arguments -> those of the two results

# --- the interface of XLA for functions outside of a program: structures of jaxlib/include/xla/ffi/api/c_api.h


def structure(*fields):
    """A structure of C that begins with its size and a pointer to an extension, of (name, type)."""
    head = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]
    return type("Structure", (ctypes.Structure,), {"_fields_": head + list(fields)})


Buffer = structure(
    ("dtype", ctypes.c_int),
    ("data", ctypes.c_void_p),
    ("rank", ctypes.c_int64),
    ("dims", ctypes.POINTER(ctypes.c_int64)),
)
Buffers = structure(
    ("size", ctypes.c_int64), ("types", ctypes.c_void_p), ("each", ctypes.POINTER(ctypes.POINTER(Buffer)))
)
Version = structure(("major", ctypes.c_int), ("minor", ctypes.c_int))
Api = structure(("version", Version))
CallFrame = structure(
    ("api", ctypes.POINTER(Api)),
    ("context", ctypes.c_void_p),
    ("stage", ctypes.c_int),
    ("args", Buffers),
    ("rets", Buffers),
)


class Metadata(ctypes.Structure):
    """What XLA asks once, when the function is registered."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("version", Version))


class MetadataExtension(ctypes.Structure):
    """How it asks."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )  # fmt: skip


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
def called(frame):
    """The function that programs call: four arrays of words of one shape -> two."""
    frame = frame.contents
    if frame.extension:
        version = ctypes.cast(frame.extension, ctypes.POINTER(MetadataExtension)).contents.metadata.contents.version
        ours = frame.api.contents.version
        version.major, version.minor = ours.major, ours.minor
        return None
    arguments, results = frame.args.each[:4], frame.rets.each[:2]
    first = arguments[0].contents
    size = math.prod(first.dims[: first.rank])
    if size > MOST_KEPT_WORDS:
        arrays = [_array(each, size) for each in arguments + results]
        for first in range(0, size, MANY):
            words = [array[first : first + MANY] for array in arrays]
            words[4][:], words[5][:] = threefry(words[:2], words[2:4])
        return None
    words = b"".join([ctypes.string_at(each.contents.data, 4 * size) for each in arguments])
    hashed = kept.get(words)
    if hashed is None:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        hashed = kept[words] = _hash(words, size)
    for place, result in zip(results, hashed, strict=True):
        ctypes.memmove(place.contents.data, result, 4 * size)
    return None


def _array(buffer, size):
    return np.ctypeslib.as_array((ctypes.c_uint32 * size).from_address(buffer.contents.data))


def _hash(words, size):
    """The two results, from the bytes of the four arguments of ``size`` words each."""
    arguments = np.frombuffer(words, np.uint32).reshape(4, size)
    if size > FEW:
        return [each.tobytes() for each in threefry(arguments[:2], arguments[2:])]
    each = [threefry(words[:2], words[2:]) for words in arguments.T.tolist()]
    return [bytes(array) for array in np.array(each, np.uint32).T.copy()]


def call(*words):
    """The hash as a call out of a program, for words [...] of key and counter."""
    shape = jnp.broadcast_shapes(*(word.shape for word in words))
    result = jax.ShapeDtypeStruct(shape, jnp.uint32)
    if 0 in shape:
        return (jnp.zeros(shape, jnp.uint32),) * 2
    return jax.ffi.ffi_call(NAME, (result, result))(*(jnp.broadcast_to(word, shape) for word in words))


def leave_threefry_out_of_programs():
    """Replace the hash in all programs that this process lowers for CPUs from now on."""
    jax.ffi.register_ffi_target(NAME, jax.ffi.pycapsule(ctypes.cast(called, ctypes.c_void_p).value), platform="cpu")
    mlir.register_lowering(
        threefry2x32_p, mlir.lower_fun(lambda *words: call(*words), multiple_results=True), platform="cpu"
    )
