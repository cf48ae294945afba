// Every chart as a table: the numbers that it draws, sorted as one likes.
const column = (name, of, show = of, kind = "number") => ({ name, of, show, kind });
const COLUMNS = {};
// For each chart: which of its data, and their columns; without an entry all that its first data hold.
const TABLES = {};
const columnsOf = (id, rows) => TABLES[id]?.[1].split(" ").map((name) => COLUMNS[name])
  ?? Object.keys(rows[0]).filter((k) => rows.every((r) => typeof r[k] !== "object" || r[k] === null))
    .map((k) => column(k, (r) => r[k], (r) => (typeof r[k] === "number" ? number(r[k]) : r[k] ?? "–")));

const tabled = () => state.tables.split(" ").filter((id) => id in CHARTS);
function turnTable(id) {
  const now = tabled();
  state.tables = (now.includes(id) ? now.filter((one) => one !== id) : [...now, id]).join(" ");
  remember();
  const button = () => $(id).parentElement.querySelector(".as-table");
  draw(id).then(() => button()?.focus());
}

const SORTED = {};  // by chart: column and direction
function asTable(id, data) {
  const box = $(id);
  const shown = data !== null && tabled().includes(id);
  box.classList.toggle("away", shown);
  box.parentElement.querySelector(".as-table")?.setAttribute("aria-pressed", String(shown));
  box.parentElement.querySelector(".astable")?.remove();
  if (!shown) return;
  const rows = data[TABLES[id]?.[0] ?? Object.keys(data)[0]];
  const columns = columnsOf(id, rows);
  const [at, down] = SORTED[id] ?? [0, false];
  const value = columns[at].of;
  const compare = (a, b) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1
    : (a < b ? -1 : 1) * (down ? -1 : 1));
  const sort = (k) => { SORTED[id] = [k, k === at ? !down : false]; asTable(id, data);
    box.parentElement.querySelectorAll(".astable th button")[k].focus(); };
  const heads = columns.map((c, k) => make("th", { scope: "col", class: c.kind,
    "aria-sort": k === at ? (down ? "descending" : "ascending") : "none" },
  make("button", { type: "button", onclick: () => sort(k) }, c.name)));
  box.after(make("div", { class: "scroll astable", tabindex: "0", role: "region", "aria-label": CHARTS[id].say() },
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...[...rows].sort((a, b) => compare(value(a), value(b))).map((r) =>
        make("tr", {}, ...columns.map((c) => cell(c.show(r) ?? "–", c.kind))))))));
}
