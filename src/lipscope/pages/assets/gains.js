// What taking tokens apart gains beside moving them.
$("gains").hidden = !D.gains.length;
const gain = () => D.gains[state.taken] ?? D.gains[0];
const gainName = (g) => `${D.settings[g.s].model}, layer ${g.layer}, ${g.n} tokens, window ${g.sample}`;
const gainEnds = (r) => ends({ sigma: r.gain, upper: r.upper });
const gainWay = (r) => (r.way === "split" ? "taken apart" : "moved");
registerMarks("y", D.gains.flatMap((g) => g.tokens), () => null,
  (r) => [make("b", {}, `token ${r.index}: “${r.text}”`), line(`${gainWay(r)}: gain in ${gainEnds(r)}`)]);
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
  fill("gains-controls", chooseRecord("Window taken apart", D.gains, g, gainName, "taken"));
  $("gains-about").textContent = `${gainName(g)}, ${g.n} tokens`;
  const better = g.tokens.filter((t) => t.better).length;
  $("gains-note").textContent = `${better} of ${g.n} tokens are known to gain more when they are taken apart than when they `
    + "are moved: the lower end of the one is above the upper end of the other. Bars reach up to the upper end of each interval.";
});
