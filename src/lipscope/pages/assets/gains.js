// What taking tokens apart gains beside moving them.
$("gains").hidden = !D.gains.length;
const gained = D.gains.map((g) => ({ ...g, tokens: g.tokens.flatMap((t) => ["moved", "split"].map((way) => (
  { index: t.index, text: t.text, way, gain: t[way], upper: t[`${way}_upper`], better: way === "split" && t.better }))) }));
const gainRows = gained.flatMap((g) => g.tokens);
gainRows.forEach((r, y) => { r.y = y; });
const gain = () => gained[state.taken] ?? gained[0];
const gainName = (g) => `${D.settings[g.s].model}, layer ${g.layer}, window ${g.sample}`;
const gainEnds = (r) => ends({ sigma: r.gain, upper: r.upper });
const gainWay = (r) => (r.way === "split" ? "taken apart" : "moved");
MARKS.y = [() => null, (y) => [make("b", {}, `token ${gainRows[y].index}: “${gainRows[y].text}”`),
  line(`${gainWay(gainRows[y])}: gain in ${gainEnds(gainRows[y])}`)]];
CHARTS.apart = { spec: "gains", say: () => "Gains of moving and of taking apart every token",
  data: () => ({ tokens: gain()?.tokens ?? [] }), signals: () => ({ axes: gain()?.axes }) };
COLUMNS.token = column("token", (r) => r.index);
COLUMNS.text = column("text", (r) => r.text, (r) => r.text, "text");
COLUMNS.way = column("way", gainWay, gainWay, "whole");
COLUMNS.gain = column("gain", (r) => r.gain, gainEnds);
COLUMNS.better = column("known to gain more", (r) => String(r.better), (r) => (r.better ? "yes" : ""), "whole");
TABLES.apart = ["tokens", "token text way gain better"];
DRAWERS.push(() => {
  const g = gain();
  if (!g) return;
  fill("gains-controls", select("Window taken apart", gained.indexOf(g), gained.map((one, k) => [k, gainName(one)]),
    (taken) => choose({ taken })));
  $("gains-about").textContent = `${gainName(g)}, ${g.n} tokens`;
  const better = g.tokens.filter((t) => t.better).length;
  $("gains-note").textContent = `${better} of ${g.n} tokens are known to gain more when they are taken apart than when they `
    + "are moved: the lower end of the one is above the upper end of the other. Bars reach up to the upper end of each interval.";
});
