// What the report carries, what is chosen, and the controls that choose it.

const records = (columns) => {
  const names = Object.keys(columns);
  return names.length
    ? columns[names[0]].map((_, k) => Object.fromEntries(names.map((n) => [n, columns[n][k]])))
    : [];
};
const [points, means, steps] = [D.points, D.means, D.steps].map(records);
const { fits } = D;

// s: setting, layer and head: chosen; front: the layer in front of charts of all (null: none).
const state = { s: 0, source: null, built: null, layer: null, head: null, front: null, picked: -1,
  quantity: "sigma", length: null, trained: null, metric: null, place: null, rank: 1, sort: "sigma", kind: "real",
  ratio: "sigma", at: null, every: null, deep: null, taken: 0, edited: 0, decided: 0, watched: 0, seen: null, push: 0, along: 0, size: 0,
  theme: null, tables: "" };

const setting = () => D.settings[state.s];
const tokensOf = (s) => (s.move === "all" && s.read === "all"
  ? "all move, all read" : `move ${s.move}, read ${s.read}`);
const ours = (p) => p.s === state.s && (p.source === null || p.source === state.source);
const here = (p) => ours(p) && p.head === state.head;
const card = () => D.cards.find((c) => here(c) && c.layer === state.layer);
const layerName = (layer) => (layer === "model" ? "whole model" : `layer ${layer}`);
const headName = (head) => (head === null ? "all heads" : `head ${head}`);
const inputName = (p) => (p.kind === "real" ? `window ${p.sample}` : p.kind);

// --- choosing ----------------------------------------------------------------------------

const windowsHere = () => points.filter((p) => here(p) && p.layer === state.layer
  && p.kind === "real" && D.windows[p.i]);

// The window of the key figures, or the middle one by sigma among those that are carried.
function remarkable() {
  const some = windowsHere();
  const own = some.find((p) => p.n === card()?.n && p.sample === card()?.sample);
  if (own) return own.i;
  const last = Math.max(...some.map((p) => p.n));
  const at = some.filter((p) => p.n === last).sort((a, b) => a.sigma - b.sigma);
  return at.length ? at[Math.floor((at.length - 1) / 2)].i : -1;
}

function largestLayer() {
  const some = D.cards.filter((c) => here(c) && c.sigma > 0).sort((a, b) => b.sigma - a.sigma);
  return some.length ? some[0].layer : setting().layers[0];
}

const kindsBuilt = () => setting().kinds.filter((kind) => kind !== "real");

function choose(change) {
  settle(change);
  remember();
  controls();
  drawAll();
}

// The state after a change: whatever does not go with it is chosen anew.
function settle(change) {
  Object.assign(state, change);
  const s = setting();
  const holds = (f) => means.some((m) => m.s === state.s && m.head === state.head && m.source === f);
  if (!s.sources.includes(state.source)) state.source = s.sources.find(holds) ?? s.sources[0] ?? null;
  if (!kindsBuilt().includes(state.built)) state.built = kindsBuilt()[0] ?? null;
  if (state.head === null ? !s.together : !s.heads.includes(state.head)) {
    state.head = s.together ? null : s.heads[0];
  }
  if (!s.layers.includes(state.layer)) {
    state.layer = largestLayer();
    state.front = null;
  }
  if (!s.layers.includes(state.front)) state.front = null;
  const p = points[state.picked];
  const elsewhere = p && p.kind !== "real" && "source" in change && !("picked" in change);
  if (!p || !here(p) || p.layer !== state.layer || elsewhere) state.picked = remarkable();
}

function pick(i) {
  const p = points[i];
  const front = state.front === null ? null : p.layer;
  choose({ s: p.s, source: p.source ?? state.source, layer: p.layer, head: p.head, front, picked: i });
}

// --- controls ----------------------------------------------------------------------------

// One of some records by its place, and one of some lengths.
const chooseRecord = (label, all, now, nameOf, key) => select(label, all.indexOf(now),
  all.map((one, k) => [k, nameOf(one)]), (k) => choose({ [key]: k }));
const chooseLength = (label, now, lengths, key) => select(label, now,
  lengths.map((n) => [n, `${n} tokens`]), (n) => choose({ [key]: n }));

const FIELDS = [["Model", (s) => s.model], ["Map", (s) => s.map], ["Metric", (s) => s.metric],
  ["Tokens", tokensOf], ["Text", (s) => s.text || "not named"]];
const ALONE = { Tokens: "all move, all read", Text: null };  // said only where others are there

// The setting with this value that shares most with the present one.
function nearest(index, value) {
  const now = FIELDS.map(([, of]) => of(setting()));
  const score = (s) => FIELDS.reduce((sum, [, of], k) => sum + (k === index
    ? 100 * (of(s) === value) : (of(s) === now[k]) * (10 - k)), 0);
  const scores = D.settings.map(score);
  return scores.indexOf(Math.max(...scores));
}

function controls() {
  const s = setting();
  const parts = FIELDS.map(([name, of], k) => {
    const open = D.settings.filter((t) => FIELDS.slice(0, k).every(([, f]) => f(t) === f(s)));
    const values = distinct((k ? open : D.settings).map(of));
    const alone = values.length < 2 && name in ALONE;
    return alone && (ALONE[name] === null || values[0] === ALONE[name]) ? null
      : select(name, of(s), values.map((v) => [v, v]), (v) => choose({ s: nearest(k, v) }));
  });
  const heads = [...(s.together ? [null] : []), ...s.heads];
  const chosen = points[state.picked];  // by a click perhaps, and without a text on this page
  const windows = distinct([...windowsHere(), ...chosen ? [chosen] : []])
    .sort((a, b) => b.n - a.n || a.sample - b.sample);
  parts.push(
    s.sources.length > 1 ? select("Folder", state.source, s.sources.map((f) => [f, f]),
      (source) => choose({ source })) : null,
    select("Layer", state.layer, s.layers.map((l) => [l, layerName(l)]),
      (layer) => choose({ layer, front: layer })),
    select("Head", state.head, heads.map((h) => [h, headName(h)]), (head) => choose({ head })),
    windows.length > 1 ? select("Window", state.picked, windows.map((p) => [p.i,
      `${p.n} tokens, ${inputName(p)}: sigma ${number(p.sigma, 3)}`]),
    (picked) => choose({ picked })) : null,
  );
  fill("controls", ...parts);
  $("chosen").textContent = `Shown: ${s.model}, map ${s.map}, metric ${s.metric}, ${tokensOf(s)}`
    + `${s.text ? `, text ${s.text}` : ""}${state.source ? `, folder ${state.source}` : ""}; `
    + `${layerName(state.layer)}, ${headName(state.head)}.`;
}
