// Two folders side by side: one table of rows is what the charts, the words and the tables show.
$("compare").hidden = !D.contrast;
const contrasts = (D.contrast?.tables ?? []).map((t, k) => ({ ...t, k }));
const marked = contrasts.flatMap((t) => [...records(t.rows).map((r) => ({ ...r, k: t.k })),
  ...records(t.exponents).map((r) => ({ ...r, k: t.k, exponent: true }))]);

// The table of the chosen map, metric and quantity, or the nearest one.
function contrast() {
  const s = setting();
  const score = (t) => 8 * (t.map === s.map) + 4 * (t.heads === (state.head !== null)) + 2 * (t.metric === s.metric)
    + 2 * (t.move === s.move) + (t.model === "" || t.model === s.model) + (t.text === "" || t.text === s.text);
  const scores = contrasts.map(score);
  const best = contrasts.filter((_, k) => scores[k] === Math.max(...scores));
  return best.find((t) => t.quantity === state.ratio) ?? best[0];
}
const rowsCompared = () => marked.filter((r) => r.k === contrast()?.k);
const comparedRows = () => rowsCompared().filter((r) => !r.exponent);
const lengthsCompared = () => lengthsOf(comparedRows());
const lengthCompared = () => (lengthsCompared().includes(state.at) ? state.at : lengthsCompared().at(-1));
const chosenIn = (name) => (comparedRows().find((r) => r[name] === state[name]) ?? comparedRows()[0])?.[name];
const headCompared = () => chosenIn("head");
const layerCompared = () => chosenIn("layer");
const comparedName = (r) => `${layerName(r.layer)}, ${headName(r.head)}, ${r.n} tokens`;
const times = (v) => (v === null ? "–" : `× ${number(v, 3)}`);
const within = (r, digits = 3) => (r.low === null ? "–" : `[${downward(r.low, digits)}, ${upward(r.high, digits)}]`);

const shiftsShown = () => rowsCompared().filter((r) => r.exponent && r.head === headCompared());
registerMarks("c", marked, (r) => choose({ layer: r.layer, front: state.front === null ? null : r.layer,
  head: r.head, ...r.exponent ? {} : { at: r.n } }), explainCompared);
const verdict = (r) => r.why || `${r.how}: ${r.count}; p = ${number(r.p, 2)}, by Holm ${number(r.holm, 2)}: `
  + (r.changed ? "changed" : "not beyond the sampling");
function explainCompared(r) {
  const [a, b] = D.contrast.names;
  if (r.exponent) {
    return [make("b", {}, `${comparedName(r)}: exponents`), line(`${a}: ${number(r.a, 3)}, ${b}: ${number(r.b, 3)}`),
      line(`difference ${number(r.difference, 2)}${r.low === null ? "" : ` in ${within(r)}`}`), line(verdict(r))];
  }
  return [make("b", {}, comparedName(r)),
    line(`${a}: ${number(r.a)} in [${downward(r.a_low)}, ${upward(r.a_high)}]`),
    line(`${b}: ${number(r.b)} in [${downward(r.b_low)}, ${upward(r.b_high)}]`),
    line(`ratio ${number(r.ratio, 3)}${r.low === null ? "" : ` in ${within(r)}`}`),
    line(verdict(r))];
}

CHARTS.sides = { spec: "sides", say: () => `Both folders against the number of tokens, ${layerName(layerCompared())}`,
  data: () => ({ means: comparedRows().filter((r) => r.layer === layerCompared() && r.head === headCompared())
    .flatMap((r) => ["a", "b"].map((side) => ({ side, c: r.c, n: r.n, value: r[side],
      low: r[`${side}_low`], high: r[`${side}_high`] }))) }),
  signals: () => ({ axes: contrast().axes, quantity: contrast().quantity }), empty: "Nothing to compare." };
CHARTS.ratios = { spec: "ratios", say: () => `Ratio of the second folder to the first by layer, ${lengthCompared()} tokens`,
  data: () => ({ changes: comparedRows().filter((r) => r.n === lengthCompared() && r.head === headCompared()) }),
  signals: () => ({ axes: contrast().ratios, quantity: `${contrast().quantity}: second / first` }), empty: "Nothing to compare." };
CHARTS.shifts = { spec: "shifts", say: () => "Exponents of the second folder less those of the first, by layer",
  data: () => ({ changes: shiftsShown().filter((r) => r.difference !== null) }), signals: () => ({ quantity: `exponent of ${contrast().quantity}: second − first` }),
  empty: "No exponents to compare." };
COLUMNS.difference = column("difference", (r) => r.difference, (r) => number(r.difference, 2));
COLUMNS.side = column("folder", (r) => r.side, (r) => D.contrast.names[r.side === "a" ? 0 : 1], "whole");
COLUMNS.mean = column("mean", (r) => r.value, (r) => number(r.value));
COLUMNS.ratio = column("ratio", (r) => r.ratio, (r) => number(r.ratio, 3));
COLUMNS.within = column("95 %", (r) => r.low, (r) => within(r));
COLUMNS.holm = column("p by Holm", (r) => r.holm, (r) => number(r.holm, 2));
COLUMNS.changed = column("changed", (r) => String(r.changed), (r) => (r.changed ? "yes" : "no"), "whole");
TABLES.sides = ["means", "n side mean between"];
TABLES.shifts = ["changes", "layer difference within holm changed"];
TABLES.ratios = ["changes", "layer ratio within holm changed"];

DRAWERS.push(() => {
  const t = contrast();
  if (!t) return;
  const [a, b] = D.contrast.names;
  const rows = comparedRows();
  const heads = t.heads ? `, ${headName(headCompared())}` : "";
  list("differ", D.contrast.differ, [["", ([name]) => name, "row"], [a, ([, x]) => x], [b, ([, , y]) => y]]);
  const quantities = contrasts.filter((o) => ["map", "metric", "move", "read", "side", "heads", "model", "text"]
    .every((name) => o[name] === t[name])).map((o) => [o.quantity, o.quantity]);
  fill("compare-controls",
    select("Compared", t.quantity, quantities, (ratio) => choose({ ratio })),
    chooseLength("Length compared", lengthCompared(), lengthsCompared(), "at"),
    select("Rows", state.every, [[null, "changed"], ["yes", "all"]], (every) => choose({ every })));
  $("compare-said").textContent = t.said;
  $("sides-title").textContent = `${t.quantity} against the number of tokens`;
  $("sides-about").textContent = `map ${t.map}, ${layerName(layerCompared())}${heads}`;
  $("ratios-title").textContent = `${b} / ${a}, by layer`;
  $("ratios-about").textContent = `${t.quantity}, ${lengthCompared()} tokens${heads}`;
  $("side-a").textContent = a;
  $("side-b").textContent = b;
  const size = (r) => Math.abs(Math.log(r.ratio));
  const shown = rows.filter((r) => state.every || r.changed).sort((x, y) => size(y) - size(x));
  const front = (r) => r.layer === layerCompared();
  const windows = ["windows", (r) => r.why || `${r.count}, ${r.how}`, "text"];
  list("changed", shown, [["layer", (r) => r.layer, "number"], ["head", (r) => r.head ?? "all"], ["tokens", (r) => r.n, "number"],
    [a, (r) => number(r.a), "number"], [b, (r) => number(r.b), "number"], ["ratio", (r) => times(r.ratio), "number"],
    ["95 %", (r) => within(r), "number"], ["p", (r) => number(r.p, 2), "number"], ["p by Holm", (r) => number(r.holm, 2), "number"],
    ["changed", (r) => (r.changed ? "yes" : "no")], windows], front);
  const grown = shiftsShown();
  $("shifted").hidden = !grown.length;
  $("shifts-said").textContent = t.exponents_said;
  $("shifts-title").textContent = `Exponent of ${t.quantity}`;
  list("shifts-table", grown, [["layer", (r) => r.layer, "number"], [a, (r) => number(r.a, 2), "number"],
    [b, (r) => number(r.b, 2), "number"], ["difference", (r) => number(r.difference, 2), "number"],
    ["95 %", (r) => within(r, 2), "number"], ["p by Holm", (r) => number(r.holm, 2), "number"], windows], front);
  $("compare-note").textContent = (state.every ? "" : shown.length ? "Rows that changed, the largest change first. "
    : "No row changed beyond the sampling. ") + D.contrast.remarks.join(" ");
});
