// Tables in .sortable are sorted by a click on a column's head, or by Enter on it.
for (const board of document.querySelectorAll(".sortable table")) {
  const body = board.tBodies[0];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b) : typeof a === "number" ? -1 : 1);
  [...board.tHead.rows[0].cells].forEach((head, column) => {
    head.tabIndex = 0;
    head.setAttribute("role", "button");
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of board.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => compare(value(a, column), value(b, column)));
      body.append(...(down ? rows.reverse() : rows));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
}

// Tables in .filterable have a box for words, and a list of choices for each column of few different words.
for (const board of document.querySelectorAll(".filterable table")) {
  const rows = [...board.tBodies[0].rows];
  const text = (row, column) => row.cells[column].textContent.trim();
  const bar = document.createElement("form");
  bar.className = "filters";
  bar.addEventListener("submit", (event) => event.preventDefault());
  const words = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter by name" });
  words.setAttribute("aria-label", "Filter by name");
  const shown = Object.assign(document.createElement("output"), { className: "shown" });
  const choices = [];
  bar.append(words);
  [...board.tHead.rows[0].cells].forEach((head, column) => {
    const values = [...new Set(rows.map((row) => text(row, column)))];
    if (values.length < 2 || values.length > 12 || values.some((each) => !Number.isNaN(parseFloat(each)))) return;
    const name = head.textContent.trim();
    const choice = document.createElement("select");
    choice.setAttribute("aria-label", name);
    choice.append(new Option(`${name}: any`, ""), ...values.map((each) => new Option(`${name}: ${each}`, each)));
    choices.push([choice, column]);
    bar.append(choice);
  });
  const filter = () => {
    const sought = words.value.toLowerCase();
    for (const row of rows) {
      const fits = choices.every(([choice, column]) => !choice.value || text(row, column) === choice.value);
      row.hidden = !fits || !text(row, 0).toLowerCase().includes(sought);
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  bar.append(shown);
  bar.addEventListener("input", filter);
  board.closest(".filterable").prepend(bar);
  filter();
}
