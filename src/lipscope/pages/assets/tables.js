// Every chart as a table: the numbers that it draws, sorted as one likes.
const column = (name, of, show = of, kind = "number") => ({ name, of, show, kind });
const order = (layer) => D.layers.indexOf(layer);
const COLUMNS = {
  layer: column("layer", (r) => order(String(r.layer)), (r) => r.layer),
  head: column("head", (r) => r.head ?? -1, (r) => r.head ?? "all"),
  n: column("tokens", (r) => r.n),
  input: column("input", (r) => (r.kind === "real" ? r.sample : r.kind), inputName, "whole"),
  ends: column("[sigma, upper]", (r) => r.sigma, ends),
  rest: column("without top token", (r) => r.rest, (r) => number(r.rest)),
  radius: column("radius", (r) => r.radius, (r) => number(r.radius)),
  rank: column("stable rank", (r) => r.rank, (r) => number(r.rank)),
  step: column("step", (r) => r.step),
  sigma: column("sigma", (r) => r.sigma, (r) => number(r.sigma)),
  relative: column("relative", (r) => r.relative, (r) => number(r.relative)),
  share: column("share of top token", (r) => r.share, (r) => percent(r.share)),
  between: column("interval", (r) => r.low, between),
  count: column("windows", (r) => r.count),
  top: column("top token is most often", (r) => r.top ?? "", (r) => (r.top ? `${r.top} (${r.often})` : "–"), "whole"),
  series: column("series", (r) => r.kind, (r) => KINDS[r.kind] ?? r.kind, "whole"),
  exponent: column("exponent", (r) => r.slope, (r) => r.slope.toFixed(2) + interval(r)),
  law: column("power law", (r) => String(r.fits), (r) => (r.fits === false ? "no" : r.fits ? "yes" : "–"), "whole"),
  span: column("lengths", (r) => r.from, (r) => r.span),
  slope: column("slope", (r) => r.slope, (r) => r.slope.toFixed(2)),
  name: column("line", (r) => r.name, (r) => r.name, "text"),
  value: column("value", (r) => r.value, (r) => (r.upper > r.value ? ends({ sigma: r.value, upper: r.upper }) : number(r.value))),
};
// For each chart: which of its data, and their columns; without an entry all that its first data hold.
const TABLES = {
  focus: ["points", "n input ends rest"],
  real: ["points", "layer n input ends"],
  adversarial: ["points", "layer n input ends"],
  exponents: ["fits", "layer series exponent law"],
  slopes: ["slopes", "layer span slope"],
  steps: ["means", "step layer sigma between count"],
  heatmap: ["cells", "layer head sigma between relative share top count"],
  bounds: ["lines", "name n value"],
  "radius-n": ["points", "layer n input radius"],
  "sigma-radius": ["points", "layer n input radius ends"],
  rank: ["points", "layer n input rank"],
};
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
