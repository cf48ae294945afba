// Charts: made once, given other data when something else is chosen.
const views = new Map();
// What sections of their own draw besides their charts, in the order of their files.
const DRAWERS = [];

const CHARTS = {};
async function draw(id) {
  const chart = CHARTS[id];
  const box = $(id);
  const data = chart.data();
  const empty = Object.values(data)[0].length === 0;
  const spec = typeof chart.spec === "function" ? chart.spec() : chart.spec;
  let view = views.get(id);
  if (empty || (view && view.spec !== spec)) {
    view?.view.finalize();
    views.delete(id);
    view = undefined;
    box.replaceChildren();
    box.parentElement.querySelector(".tools")?.remove();
  }
  box.setAttribute("aria-label", empty ? "" : chart.say());
  if (empty) {
    box.append(make("p", { class: "note" }, chart.empty ?? "Nothing to draw."));
    return asTable(id, null);
  }
  if (!view) {
    box.replaceChildren();
    const embedded = await vegaEmbed(box, filled(D.specs[spec], data, chart.signals()), { mode: "vega",
      renderer: "svg", actions: false, defaultStyle: false, hover: true, tooltip: hover, ast: D.strict ?? false });
    view = { spec, view: embedded.view };
    view.view.addEventListener("click", (_, item) => clicked(item?.datum));
    views.set(id, view);
    box.parentElement.querySelector("figcaption").append(make("span", { class: "tools" },
      make("button", { class: "as-table", type: "button", onclick: () => turnTable(id) }, "Table"),
      make("button", { class: "save", type: "button", onclick: () => save(id) }, "SVG")));
  } else {
    for (const [name, value] of Object.entries(chart.signals())) view.view.signal(name, value ?? null);
    for (const [name, rows] of Object.entries(data)) view.view.data(name, structuredClone(rows));
    await view.view.runAsync();
  }
  const tools = box.parentElement.querySelector(".tools");
  tools.firstChild.setAttribute("aria-label", `Show this chart as a table: ${chart.say()}`);
  tools.lastChild.setAttribute("aria-label", `Save this chart as SVG: ${chart.say()}`);
  reachable(box);
  return asTable(id, data);
}

function placed(id) {
  const { section, title, about } = CHARTS[id];
  if (!$(id)) $(section).append(make("figure", {}, make("figcaption", {}, make("b", {}, title), make("span", {}, about ?? "")),
    make("div", { class: "chart", id, role: "img" })));
}

// The specification with its first data and choices inside.
function filled(spec, data, signals) {
  const own = structuredClone(spec);
  for (const d of own.data) if (d.name in data) d.values = structuredClone(data[d.name]);
  for (const g of own.signals) if (g.name in signals) g.value = signals[g.name] ?? null;
  return own;
}

// What marks stand for: rows, each with its place under this name; what a click chooses, and what is told.
const MARKS = {};
function registerMarks(name, rows, chosen, told) {
  rows.forEach((r, k) => { r[name] = k; });
  MARKS[name] = { rows, chosen, told };
}
const markOf = (datum) => Object.keys(MARKS).find((name) => datum?.[name] !== undefined);

function clicked(datum) {
  const name = markOf(datum);
  if (name) MARKS[name].chosen(MARKS[name].rows[datum[name]]);
}

// The chart as it would be printed: colours of the light theme instead of their names.
async function save(id) {
  let svg = await views.get(id).view.toSVG();
  for (const [name, colour] of Object.entries(D.inks)) svg = svg.replaceAll(`var(${name})`, colour);
  saveAs(`${id}.svg`, svg, "image/svg+xml");
}
function saveAs(download, content, type) {
  const link = make("a", { download, href: URL.createObjectURL(new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// --- under the mouse ---------------------------------------------------------------------

const hideTip = () => { $("tip").style.display = "none"; };
for (const kind of ["scroll", "pointerdown", "keydown", "pointercancel"]) {
  document.addEventListener(kind, hideTip, { capture: true, passive: true });
}
document.addEventListener("pointerover", (e) => { if (!e.target.closest?.(".chart")) hideTip(); });

function hover(_, event, item, value) {
  const told = value === null || value === undefined || value === "" ? [] : explain(item.datum, value);
  showTip(told, event?.clientX, event?.clientY);  // none when a chart goes
}

function showTip(told, x, y) {
  const tip = $("tip");
  tip.style.display = told.length ? "block" : "none";
  if (!told.length) return;
  tip.replaceChildren(...told);
  const { width, height } = tip.getBoundingClientRect();
  const right = x + 16 + width > window.innerWidth;
  tip.style.left = `${Math.max(4, right ? x - width - 12 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, window.innerHeight - height - 6))}px`;
}

const line = (text) => make("div", {}, text);
function explain(datum, value) {
  const name = markOf(datum);
  if (name) return MARKS[name].told(MARKS[name].rows[datum[name]]);
  if (datum.group !== undefined) return explainBound(datum);
  return Object.entries(value).map(([key, text]) => line(`${key}: ${text}`));
}
