// The charts of the report: what each draws, and what its marks tell.
const MANY = 1500;  // points that a chart draws; more cannot be told apart

const thin = (rows) => (rows.length <= MANY ? rows
  : rows.filter((_, k) => Math.floor(k * MANY / rows.length)
    !== Math.floor((k - 1) * MANY / rows.length)));
const real = (p) => here(p) && p.kind === "real";
const other = (p) => here(p) && p.kind === state.built;
const axes = (kind) => setting().axes[state.head === null ? "all" : "heads"][kind];
const focusAbout = () => `${layerName(state.layer)}, ${headName(state.head)}; the other layers `
  + "faintly behind. A click on a point chooses its window.";
const asked = (option) => `Not measured in this selection: add ${option} to `
  + "lipscope measure.";

// One of all layers against the number of tokens: points and means of a kind, points only where they are drawn.
const byLayer = (spec, say, of, kind, drawn = () => true) => ({ spec, say,
  data: () => ({ points: thin(points.filter((p) => of(p) && drawn(p))), means: means.filter(of) }),
  signals: () => ({ axes: axes(kind), layer: state.front, head: state.head }) });

// For each chart: its specification, what it draws (null: nothing), and why it is empty. One
// that has no place in the page names the section that it closes, and its title.
Object.assign(CHARTS, {
  focus: { spec: "focus", say: () => `Sigma against the number of tokens, ${focusAbout()}`,
    data: () => ({ points: points.filter((p) => real(p) && p.layer === state.layer),
      means: means.filter(real) }),
    signals: () => ({ axes: axes("real"), layer: state.layer, head: state.head, picked: state.picked }) },
  real: byLayer("layers", () => "Growth of sigma by layer on real text", real, "every"),
  adversarial: { ...byLayer("layers", () => `Growth of sigma by layer on inputs of the kind ${state.built}`, other, "every"),
    empty: "No adversarial inputs in this selection, nor other ones that were built. They come from lipscope bounds … --attack "
      + "--out DIR, or from a sweep over inputs." },
  exponents: { spec: "exponents", say: () => "Fitted exponents by layer with intervals",
    data: () => ({ fits: fits.filter((f) => real(f) || other(f) || (here(f) && f.kind === "rest")) }), signals: () => ({ head: state.head }),
    empty: "An exponent takes three lengths." },
  slopes: { spec: "slopes", say: () => "Slopes between neighbouring lengths by layer",
    data: () => ({ slopes: fits.filter(real).flatMap(localSlopes) }),
    signals: () => ({ layer: state.front, head: state.head }),
    empty: "A local slope takes three lengths." },
  steps: { spec: "training", say: () => `Sigma against training step at ${trained()} tokens`,
    data: () => ({ means: stepsHere(), points: stepPoints() }),
    signals: () => ({ axes: group()?.axes[state.head === null ? "all" : "heads"][trained()],
      layer: state.front, head: state.head }),
    empty: "No checkpoints of this model. They come from a sweep over checkpoints." },
  heatmap: { spec: () => `heads-${state.quantity}`, say: () => "Layers and heads",
    data: () => ({ cells: cells() }),
    signals: () => ({ layer: state.layer, head: state.head }),
    empty: asked("--per-head") },
  bounds: { spec: "bounds", say: () => "Measured values between their bounds",
    data: () => ({ lines: sandwich()?.lines ?? [], names: sandwich()?.names ?? [] }),
    signals: () => ({ axes: sandwich()?.axes }),
    empty: "No bounds for this model in these folders. They come from lipscope bounds … --out DIR." },
  "radius-n": { ...byLayer("radius-n", () => "Radius against the number of tokens", real, "real", (p) => p.radius > 0),
    empty: "No radius in these rows." },
  "sigma-radius": { spec: "sigma-radius", say: () => "Sigma against the radius",
    data: () => ({ points: thin(points.filter((p) => real(p) && p.radius > 0 && p.sigma > 0)) }),
    signals: () => ({ layer: state.front, head: state.head }),
    empty: "No radius in these rows." },
  rank: { ...byLayer("rank", () => "Stable rank against the number of tokens", real, "real", (p) => p.rank > 0),
    empty: asked("--average") },
});

function localSlopes(fit) {
  return fit.local.map((slope, k) => ({ layer: fit.layer, head: fit.head, kind: fit.kind, slope,
    f: fit.f, from: fit.lengths[k], span: `${fit.lengths[k]}–${fit.lengths[k + 1]}` }));
}

// Checkpoints of the chosen model at one length: the largest one unless another is chosen.
const group = () => D.groups[setting().group];
const stepHere = (t) => t.g === setting().group && t.head === state.head
  && (t.source === null || t.source === state.source);
const stepLengths = () => lengthsOf(steps.filter(stepHere));
const trained = () => (stepLengths().includes(state.trained) ? state.trained : stepLengths().at(-1));
const stepsHere = () => steps.filter((t) => stepHere(t) && t.n === trained());
const stepPoints = () => points.filter((p) => group()?.settings.includes(p.s) && p.kind === "real"
  && (p.source === null || p.source === state.source) && p.head === state.head && p.layer === state.front && p.n === trained() && p.sigma > 0)
  .map((p) => ({ ...p, step: D.settings[p.s].step }));

const headMeans = () => means.filter((m) => ours(m) && m.head !== null && m.kind === "real");
const headLengths = () => lengthsOf(headMeans());
const headLength = () => (headLengths().includes(state.length) ? state.length : headLengths().at(-1));
const cells = () => headMeans().filter((m) => m.n === headLength());

// The record of bounds that is shown: this model and text, the chosen metric, the nearest layer and head.
const boundsHere = () => D.bounds.filter((b) => {
  const of = D.settings[b.s];
  return of.model === setting().model && of.text === setting().text;
});
const placeOf = (b) => `${b.layer}/${b.head}/${b.map}/${b.folder}`;
function sandwich() {
  const all = boundsHere();
  const metrics = distinct(all.map((b) => b.metric));
  const metric = metrics.includes(state.metric) ? state.metric : metrics[0];
  const some = all.filter((b) => b.metric === metric);
  return some.find((b) => placeOf(b) === state.place)
    ?? some.find((b) => b.layer === state.layer && b.head === state.head && b.folder === state.source)
    ?? some.find((b) => b.layer === state.layer && b.head === state.head) ?? some[0];
}

registerMarks("i", points, (p) => pick(p.i), explainPoint);
registerMarks("m", means, (m) => choose({ layer: m.layer, head: m.head }), explainMean);
registerMarks("t", steps, chooseStep, explainStep);
registerMarks("f", fits, (f) => choose({ layer: f.layer, front: f.layer }), explainFit);
function chooseStep(t) {
  const s = group().settings.find((k) => D.settings[k].step === t.step);
  choose({ s, layer: t.layer, front: t.layer });
}

const between = (m) => ends({ sigma: m.low, upper: m.open ? null : m.high });
const meanIn = (m) => `${m.open ? "" : `${number(m.sigma)} in `}${between(m)}`;
const meanOf = (m) => (m.count > 1 ? `mean of ${m.count} windows, ${m.shared
  ? "which share text: the solver's interval" : "with 95 % for the sampling of text"}` : "one window: the solver's interval");
const explainBound = (b) => [make("b", {}, b.name), line(`${b.n} tokens`),
  line(`${b.upper > b.value ? "mean of the windows, in " : ""}${boundEnds(b)}`)];
const boundEnds = (b) => (b.upper > b.value ? ends({ sigma: b.value, upper: b.upper })
  : ["measured", "adversarial"].includes(b.group) ? `≥ ${downward(b.value)}` : `≤ ${upward(b.value)}`);

function explainPoint(p) {
  const excerpt = D.excerpts[D.begins[p.i]];
  const word = D.tops[p.i];
  return [
    make("b", {}, `${layerName(p.layer)}, ${headName(p.head)}, ${p.n} tokens, ${inputName(p)}`),
    line(`sigma ${enclosed(p)}${p.status === "max_steps" ? " (steps ran out)" : ""}`),
    p.relative === null ? "" : line(`relative ${number(p.relative, 3)}`),
    p.share === null ? "" : line(`${percent(p.share)} on token ${p.token}${word ? ` “${word}”` : ""}`
      + (p.rest === null ? "" : `; without it ${number(p.rest)}`)),
    p.radius === null ? "" : line(`radius ${number(p.radius)}`
      + (p.rank === null ? "" : `, stable rank ${number(p.rank, 3)}`)),
    p.note ? line(p.note) : "",
    excerpt ? make("q", {}, `${excerpt} …`) : "",
  ];
}

function explainMean(m) {
  return [make("b", {}, `${layerName(m.layer)}, ${headName(m.head)}, ${m.n} tokens`),
    line(`sigma ${meanIn(m)}`), line(meanOf(m)),
    line(`relative ${number(m.relative, 3)}, share of the top token ${percent(m.share)}`),
    m.top ? line(`top token most often: ${m.top} (${m.often})`) : ""];
}

function explainStep(t) {
  return [make("b", {}, `step ${t.step}: ${layerName(t.layer)}, ${headName(t.head)}, ${t.n} tokens`),
    line(`sigma ${meanIn(t)}`), line(meanOf(t))];
}

const KINDS = { real: "all tokens move", rest: "top token fixed" };
function explainFit(f) {
  return [make("b", {}, `${layerName(f.layer)}, ${KINDS[f.kind] ?? f.kind}`),
    line(`exponent ${f.slope.toFixed(2)}${interval(f)}`),
    f.low === null ? "" : line(f.interval),
    line(`local slopes ${f.local.map((s) => s.toFixed(2)).join(", ")}`),
    line(`means from the line: ${f.deviation}`),
    f.note ? line(f.note) : ""];
}
const interval = (f) => (f.low === null ? "" : ` [${f.low.toFixed(2)}, ${f.high.toFixed(2)}]`);

// --- as tables

const order = (layer) => D.layers.indexOf(layer);
Object.assign(COLUMNS, {
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
  value: column("value", (r) => r.value, boundEnds),
});
Object.assign(TABLES, {
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
});
