// The live page: every choice is sent immediately, and numbers are drawn as they arrive.
const LINES = "The hotel was wonderful.\nThe hotel was terrible.\nA story about a war.\nThe weather is cold today.";
const linesFor = (model) => (D.models[model].encoder ? LINES : "");  // decoders have next words of their own
const FIRST = { theme: null, ...D.asked, layer: null, panel: "", beside: "", second: D.models.length - 1,
  among: linesFor(0), along: 0, size: 0, tables: "" };
const state = { push: 0, ...FIRST };
const SELF = crypto.randomUUID();  // id of this window: its newer questions replace older ones
const NAMES = ["model", "map", "metric", "move", "read", "mask"];

// --- asking ------------------------------------------------------------------------------

const running = new Map();
const ENDED = { event: "error", text: "lipscope explore has ended: start it again." };
// Calls `tell` with every event of an answer; a newer question of the same kind replaces it.
async function ask(part, question, tell) {
  running.get(part)?.abort();
  const stop = new AbortController();
  running.set(part, stop);
  const mine = () => running.get(part) === stop;
  try {
    const answer = await fetch("ask", { method: "POST", signal: stop.signal,
      headers: { "content-type": "application/json" }, body: JSON.stringify({ window: SELF, part, ...question }) });
    if (!answer.ok) return mine() && tell({ event: "error", text: await answer.text() });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let [held, last] = ["", ""];;) {
      const { done, value } = await reader.read();
      if (!mine()) return undefined;
      if (done) return ["done", "error"].includes(last) ? undefined : tell(ENDED);
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ") || !mine()) continue;
        const event = JSON.parse(part.slice(6));
        last = event.event;
        tell(event);
      }
    }
  } catch (problem) {
    if (problem.name !== "AbortError" && mine()) tell(ENDED);
  }
  return undefined;
}

const question = () => ({ text: state.text, ...Object.fromEntries(NAMES.map((n) => [n, state[n]])) });

let seen = { layers: new Map() };  // the answer so far
function askAll() {
  performance.clearMarks();
  performance.mark("asked");
  document.documentElement.dataset.drawn = "";
  for (const [part, one] of running) if (part !== "all") one.abort();  // they concern the previous text
  remember();
  stale();
  staleHeads();
  const fresh = { layers: new Map(), asked: null, done: false };
  const before = () => (seen.done ? { ...seen, before: null } : seen.before);
  ask("all", question(), (event) => {
    if (event.event === "error") {  // what stands there is about another question
      seen = { layers: new Map(), done: false, before: before() };
      $("counted").textContent = "–";
      clearPanels();
      soon();
      return problem(event.text);
    }
    problem("");
    if (event.event === "asked") Object.assign(fresh, { asked: event });
    if (event.event === "rough") fresh.layers.set(event.layer, { rough: event.ends[0], row: null });
    if (event.event === "rows") fresh.layers.set(event.layer, { row: event.rows[0], words: event.words });
    if (event.event === "done") Object.assign(fresh, { done: true, seconds: event.seconds });
    if (event.event === "rough" || event.event === "rows") {
      if (!performance.getEntriesByName("first").length) soon(() => performance.mark("first"));
    }
    seen = { ...fresh, before: before() };
    if (event.event === "done") soon(() => { performance.mark("tight"); finished(); document.documentElement.dataset.drawn = "yes"; });
    return soon();
  });
}

// Pause between two drawings, as the solver needs the processors too. The first and the last number of
// an answer are drawn immediately.
const PAUSE = 250;  // ms
const after = [];
let [timer, framed, drawnAt] = [null, false, 0];
function soon(then) {
  if (then) {
    after.push(then);
    clearTimeout(timer);
    timer = null;
  }
  if (framed || timer !== null) return;
  const draw = () => { framed = false; drawnAt = performance.now(); drawSeen(); after.splice(0).forEach((one) => one()); };
  timer = setTimeout(() => { timer = null; framed = true; requestAnimationFrame(draw); }, then ? 0 : drawnAt + PAUSE - performance.now());
}

// Whether a part of the page shows this already: redrawing would trigger a new layout.
function shows(part, ...what) {
  const before = part.shown;
  part.shown = what;
  return before !== undefined && what.every((one, k) => one === before[k]);
}

function problem(text) {
  $("problem").hidden = !text;
  if ($("problem").textContent !== text) $("problem").textContent = text;
}

// --- layers ------------------------------------------------------------------------------

const layerName = (layer) => (layer === null ? "model" : `layer ${layer}`);
// Keep the previous values of a layer until its new ones arrive, so that nothing jumps.
const shownOf = (layer) => seen.layers.get(layer) ?? (seen.before?.layers.has(layer)
  ? { ...seen.before.layers.get(layer), old: true } : null);
const endsOf = (one) => (one.row ? [one.row.sigma, one.row.upper] : one.rough);
const layersShown = () => distinct([...(seen.before?.layers.keys() ?? []), ...seen.layers.keys()])
  .filter((layer) => !seen.done || seen.layers.has(layer)).sort((a, b) => a - b);

let axis = [1, 10];
function fitAxis(ends) {
  const low = Math.min(...ends.map(([s]) => s).filter((v) => v > 0));
  const high = Math.max(...ends.map(([s, u]) => Math.min(u ?? s, 1e6 * low)));
  if (!(low < Infinity)) return;
  const nice = (v, up) => { const p = 10 ** Math.floor(Math.log10(v));
    const steps = [1, 2, 5, 10]; return p * (up ? steps.find((s) => s * p >= v) : steps.findLast((s) => s * p <= v)); };
  const [a, b] = [nice(low / 1.05, false), nice(high * 1.05, true)];
  if (a < axis[0] || b > axis[1] || a > axis[0] * 5 || b < axis[1] / 5) axis = [a, b];
}
const placeOf = (v) => 100 * Math.min(Math.max(Math.log(v / axis[0]) / Math.log(axis[1] / axis[0]), 0), 1);

function drawAxis() {
  const width = $("axis").clientWidth;
  if (shows($("axis"), width, ...axis)) return;
  const ticks = [];
  for (let p = 10 ** Math.floor(Math.log10(axis[0])); p <= axis[1]; p *= 10) ticks.push(...[1, 2, 5].map((s) => s * p));
  const room = 2600 / Math.max(width, 1);  // width of a number, in per cent of the axis
  let last = -Infinity;
  const some = ticks.filter((t) => t >= axis[0] * 0.999 && t <= axis[1] * 1.001)
    .filter((t) => { const far = placeOf(t) - last >= room; if (far) last = placeOf(t); return far; });
  fill("axis", ...some.map((t) => { const mark = make("span", {}, number(t, 1).replace(/\.0$/, "")); mark.style.left = `${placeOf(t)}%`; return mark; }));
}

function lineOf(table, key, name, choose) {
  const found = table.querySelector(`tr[data-key="${key}"]`);
  if (found) return found;
  const line = make("tr", { "data-key": key }, make("th", { scope: "row" }, choose
    ? make("button", { type: "button", onclick: choose }, name) : name),
  make("td", { class: "track" }, make("div", {}, make("i", { class: "beside range" }), make("i", { class: "beside dot" }),
    make("i", { class: "range" }), make("i", { class: "dot" }))),
  make("td", { class: "number ends" }), make("td", { class: "number" }), make("td", { class: "top" }));
  table.querySelector("tbody").append(line);
  return line;
}

function place(line, which, ends) {
  const [range, dot] = line.querySelectorAll(which);
  range.hidden = dot.hidden = !ends || !(ends[0] > 0);
  if (range.hidden) return;
  const [a, b] = ends.map(placeOf);
  range.style.left = `${a}%`;
  range.style.width = `${Math.max(b - a, 0)}%`;
  dot.style.left = `${a}%`;
}

function drawLine(line, one) {
  const row = one.row;
  if (shows(line, row ?? one.rough, one.old, ...axis)) return;
  const of = endsOf(one);
  line.classList.toggle("rough", !row || Boolean(one.old));
  place(line, "i:not(.beside)", of);
  const [, , value, relative, top] = line.children;
  value.textContent = of && of[0] !== null ? ends({ sigma: of[0], upper: of[1] }) : row?.status ?? "–";
  if (!row) return;
  relative.textContent = number(row.relative, 3);
  top.replaceChildren(...row.top_token === null ? ["–"] : [make("q", {}, (one.words[row.top_token] ?? "").trim()), ` ${percent(row.top_share)}`]);
  line.title = row.error ?? row.note ?? "";
}

const besideOf = (layer) => second.layers.get(layer) ?? second.before?.layers.get(layer);
const ends2 = (layer) => (besideOf(layer) ? endsOf(besideOf(layer)) : null);
function drawSeen() {
  const shown = layersShown().map((layer) => [layer, shownOf(layer)]).filter(([, one]) => one);
  fitAxis(shown.flatMap(([layer, one]) => [endsOf(one), ends2(layer)]).filter((ends) => ends?.[0] > 0));
  drawAxis();
  const table = $("layers");
  for (const line of [...table.querySelectorAll("tbody tr")]) {
    if (!shown.some(([layer]) => `${layer}` === line.dataset.key)) line.remove();
  }
  for (const [layer, one] of shown) drawLine(lineOf(table, `${layer}`, layer ?? "all", () => chooseLayer(layer)), one);
  if (state.layer === null || !shown.some(([layer]) => layer === state.layer)) {
    if (seen.done) state.layer = largest()?.[0] ?? null;
  }
  for (const [layer] of shown) place(lineOf(table, `${layer}`), "i.beside", ends2(layer));
  for (const line of table.querySelectorAll("tbody tr")) {
    const chosen = line.dataset.key === `${state.layer}`;
    line.classList.toggle("front", chosen);
    line.querySelector("button").setAttribute("aria-pressed", String(chosen));
  }
  drawTokens();
  const { asked } = seen;
  if (asked) $("counted").textContent = `${asked.length} tokens${asked.cut ? ", the first of a longer text" : ""}`;
}

function largest() {
  const some = [...seen.layers].filter(([, one]) => one.row?.sigma > 0);
  return some.sort((a, b) => b[1].row.sigma - a[1].row.sigma)[0];
}

function chooseLayer(layer) {
  state.layer = layer;
  remember();
  drawSeen();
  askMore();
}

function finished() {
  controls();
  const top = largest();
  const rough = [...seen.layers.values()].some((one) => one.row?.status === "max_steps");
  const solved = [...seen.layers.values()].filter((one) => one.row && one.row.sigma !== null);
  const open = solved.filter((one) => one.row.upper === null).length;
  const held = [open < solved.length ? `each interval holds with probability ${1 - (top?.[1].row.delta ?? 0.01)}` : "",
    open ? "a number behind ≥ is a lower bound" : ""].filter(Boolean).join("; ");
  $("layers-note").textContent = `${held ? `${held[0].toUpperCase()}${held.slice(1)}; ` : ""}pale numbers are `
    + `still narrowing, and not yet compared with the model itself.${rough ? " Where steps ran out, intervals stay wide." : ""}`;
  $("status").textContent = top ? `${seen.layers.size} layers at ${seen.asked?.length} tokens. The largest sigma is ${ends(top[1].row)} `
    + `at ${layerName(top[0])}, top token ${top[1].words[top[1].row.top_token] ?? "none"}.` : "No sigma.";
  askMore();
}

// --- heads, a second text, and slower questions: sent after the layers --------------------------

function askMore() {
  askHeads();
  askBeside();
  askPanel();
}

// Heads of another question are pale until those of this one arrive.
let headsOf = "";
const headsAsked = () => JSON.stringify({ ...question(), layer: state.layer });
function staleHeads() {
  if (headsOf === headsAsked()) return;
  for (const line of $("heads").tBodies[0].children) Object.assign(line, { className: "rough", shown: undefined });
}

function askHeads() {
  $("of-heads").hidden = !state.heads;
  staleHeads();
  if (!state.heads || state.layer === null) return running.get("heads")?.abort();
  $("heads-title").textContent = `Heads of ${layerName(state.layer)}`;
  const asked = headsAsked();
  ask("heads", { ...question(), layer: state.layer, heads: true }, (event) => {
    if (event.event === "rows") headsOf = asked;
    if (event.event === "error") { $("heads").tBodies[0].replaceChildren(); $("heads-title").textContent = event.text; return; }
    const some = event.event === "rough" ? event.ends.map((rough) => ({ rough }))
      : event.event === "rows" ? event.rows.map((row) => ({ row, words: event.words })) : [];
    if (some.length) {
      for (const line of [...$("heads").tBodies[0].children]) if (Number(line.dataset.key) >= some.length) line.remove();
      some.forEach((one, head) => { const line = lineOf($("heads"), `${head}`, head); drawLine(line, one); place(line, "i.beside", null); });
    }
  });
  return undefined;
}

let second = { layers: new Map(), done: true };
function askBeside() {
  const text = state.beside.trim() ? state.beside : state.text;
  if (state.panel !== "compare" || (text === state.text && state.second === state.model)) {
    running.get("beside")?.abort();
    second = { layers: new Map(), done: true };
    return drawBeside();
  }
  if (!second.layers.size) $("differs").textContent = "One moment …";
  const fresh = { layers: new Map(), done: false, before: second };
  delete second.before;
  const scope = text === state.text ? {} : { move: keeps(state.move), read: keeps(state.read) };
  return ask("beside", { ...question(), ...scope, text, model: state.second }, (event) => {
    if (event.event === "error") { $("differs").textContent = event.text; return; }
    if (event.event === "rough") fresh.layers.set(event.layer, { rough: event.ends[0], row: null });
    if (event.event === "rows") fresh.layers.set(event.layer, { row: event.rows[0], words: event.words });
    if (event.event === "done") Object.assign(fresh, { done: true, before: null });
    second = fresh;
    soon(drawBeside);
  });
}

// The main difference in a sentence: the largest ratio with disjoint intervals.
function drawBeside() {
  if (!second.done) return drawSeen();  // until then, keep the sentence about the previous texts
  const both = [...second.layers].map(([layer, b]) => [layer, seen.layers.get(layer)?.row, b.row]).filter(([, a, b]) => a?.sigma > 0 && b?.sigma > 0);
  const apart = ([, a, b]) => a.upper < b.sigma || b.upper < a.sigma;
  const ratio = ([, a, b]) => b.sigma / a.sigma;
  const most = both.filter(apart).sort((x, y) => Math.abs(Math.log(ratio(y))) - Math.abs(Math.log(ratio(x))))[0];
  const [here, there] = [largest()?.[0], [...second.layers].sort((x, y) => (y[1].row?.sigma ?? 0) - (x[1].row?.sigma ?? 0))[0]?.[0]];
  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;
  $("differs").textContent = !second.layers.size ? "Write a second text." : !both.length ? "No layer has a number in both." : !most
    ? `At all ${both.length} layers the intervals meet: no difference is shown.`
    : `${sentence(layerName(most[0]))} differs most: sigma is ${number(most[1].sigma, 3)} here and ${number(most[2].sigma, 3)} there, ${number(ratio(most), 3)} times as large; `
      + `the intervals are apart at ${both.filter(apart).length} of ${both.length} layers. The largest is ${layerName(here)} here`
      + `${here === there ? " as there." : `, ${layerName(there)} there.`}`;
  list("differences", both, [["layer", ([layer]) => layer ?? "all", "row"], ["this", ([, a]) => ends(a), "number"],
    ["beside", ([, , b]) => ends(b), "number"], ["ratio", (one) => number(ratio(one), 3), "number"], ["", (one) => (apart(one) ? "" : "the intervals meet")]]);
  return drawSeen();
}

// What the panels show is about one question: it goes when the next one is refused.
function clearPanels() {
  second = { layers: new Map(), done: true };
  $("differs").textContent = "";
  fill("differences");
  $("pushed").hidden = $("words").hidden = true;
  drawKeep();
}

const PANELS = [["push", "Push it"], ["compare", "Compare"], ["certify", "Certify"], ["keep", "Keep"]];
function drawPanels() {
  fill("panels", ...PANELS.map(([name, text]) => make("button", { type: "button", "aria-expanded": String(state.panel === name),
    "aria-controls": `panel-${name}`, onclick: () => { state.panel = state.panel === name ? "" : name; remember(); drawPanels(); askBeside(); askPanel();
      document.querySelector(`#panels [aria-controls=panel-${name}]`).focus(); } }, text)));
  for (const [name] of PANELS) $(`panel-${name}`).hidden = state.panel !== name;
  $("reads").hidden = !["push", "certify"].includes(state.panel);
}

function askPanel() {
  for (const place of ["push", "words", "certify"]) if (place !== state.panel && !(place === "words" && state.panel === "push")) running.get(place)?.abort();
  if (!seen.done) return;
  if (state.panel === "push") askPush();
  if (state.panel === "certify") stale();
  if (state.panel === "keep") drawKeep();
}

function askPush() {
  const asked = { ...question(), layer: state.layer ?? 0, among: state.among };
  const told = (text) => { $("push-progress").textContent = text; };
  told(`Pushing ${layerName(state.layer)} …`);
  ask("push", { ...asked, kind: "push" }, (event) => {
    if (event.event === "error") { $("pushed").hidden = true; told(event.text); }
    if (event.event === "progress") told(`Pushing ${layerName(state.layer)}: ${event.text}.`);
    if (event.event !== "push") return;
    told("");
    $("pushed").hidden = false;
    D.pushes = [event.push];
    const { steps } = event.push.directions[0];
    if (!(state.size < steps.length) || !state.size) state.size = Math.max(0, steps.findIndex((s) => s.relative >= 0.1));
    drawPushed();
  });
  ask("words", { ...asked, kind: "words", among: "" }, (event) => {
    if (event.event === "error") $("words").hidden = true;
    if (event.event !== "words") return;
    const [worst] = event.directions;
    $("words").hidden = !worst;
    if (!worst) return;
    $("words-about").textContent = `${worst.said[0].toUpperCase()}${worst.said.slice(1)}.`;
    fill("words-tokens", ...VERBS.map(([side, verb]) => make("div", {}, make("h4", {}, verb), ...worst.tokens.filter((t) => t.side === side).map(wordsOf))));
    drawHeadParts(worst.heads);
  });
}

// --- certify

const BALLS = [["joint", "all tokens together"], ["token", "each token alone"], ["each", "every token by so much"]];
function certifyControls(busy) {
  fill("certify-controls", select("What may move", state.ball, BALLS, (ball) => { state.ball = ball; remember(); stale(); }),
    make("button", { type: "button", onclick: () => (busy ? stopCertify() : certify()) }, busy ? "Stop" : "Certify"));
}
// A certificate is about one question: it goes when another one is asked.
let certifiedOf = "";
const certifyAsked = () => ({ ...question(), move: "all", read: "all", kind: "certify", among: state.among, ball: state.ball });
function clearCertified(told) {
  for (const id of ["certified", "certified-tokens"]) fill(id);
  $("certify-progress").textContent = told;
  $("certify-note").textContent = "";
}
function stale() {
  const now = running.get("certify");
  if (now?.signal.aborted || certifiedOf !== JSON.stringify(certifyAsked())) { now?.abort(); clearCertified(""); }
  if (!running.get("certify") || running.get("certify").signal.aborted) certifyControls(false);
}
function stopCertify() {
  running.get("certify")?.abort();
  running.delete("certify");
  $("certify-progress").textContent = "Stopped.";
  certifyControls(false);
}
function certify() {
  const each = [];
  let decided = null;
  const told = (text) => { $("certify-progress").textContent = text; };
  certifiedOf = JSON.stringify(certifyAsked());
  certifyControls(true);
  clearCertified("Reading the model …");
  ask("certify", certifyAsked(), (event) => {
    if (event.event === "error") told(event.text);
    if (event.event === "progress") told(event.text);
    if (event.event === "decision") decided = event;
    if (event.event === "certificate") each.push(event);
    if (event.event === "done") told("");
    if (decided) drawCertified(decided, each);
    if (event.event === "done" || event.event === "error") { running.delete("certify"); certifyControls(false); }
  });
}
function drawCertified(decided, each) {
  const [one] = each;
  const alone = one?.ball === "token";
  const size = (c) => c.radius ?? Infinity;
  const least = alone ? each.reduce((a, b) => (size(b) < size(a) ? b : a)) : one;
  const parts = [["answer", decided.answer_name, `next: ${decided.runner_up_name}, margin ${number(decided.margin, 3)}`],
    least ? ["certified radius", certifiedRadius(least), alone ? `of token “${least.words[0]}”, the smallest; no move within it changes the answer` : "no move within it changes the answer"] : null,
    least ? ["attack", least.attack === null ? "none found" : upward(least.attack), least.attack === null ? "" : `the smallest move found that changes it, to ${least.rival_name}`] : null,
    least ? ["first order", number(least.first_order, 3), "margin over slope: no bound"] : null];
  fill("certified", ...parts.filter(Boolean).map(([name, value, about]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, about)))));
  list("certified-tokens", alone ? each : [], [["token", (c) => c.tokens[0], "row"], ["", (c) => c.words[0]], ["certified radius", certifiedRadius, "number"],
    ["attack", (c) => (c.attack === null ? "–" : upward(c.attack)), "number"], ["other words within", (c) => c.words_within ?? "–", "number"]]);
  $("certify-note").textContent = `Decided by ${decided.by}${decided.words.length < (seen.asked?.length ?? 0) ? `, of the first ${decided.words.length} tokens` : ""}.${least?.note ? ` ${least.note}.` : ""} Sizes are ${one?.ball === "each" ? "the largest norm that the move of one embedding has" : "Frobenius norms of moves of the embeddings"}.`;
}

// --- keep

const FILES = [["report", "Static report (HTML)"], ["rows", "Rows (JSON lines)"], ["figure", "Figure (SVG)"]];
function drawKeep() {
  $("link").value = `${location.origin}${location.pathname}#${fragment()}`;
  $("python").value = seen.asked?.python ?? "";
  $("command").value = seen.asked?.command ?? "";
  fill("files", ...FILES.map(([kind, name]) => make("button", { type: "button", onclick: () => download(kind) }, name)));
}
function download(kind) {
  $("keep-progress").textContent = "One moment …";
  ask("keep", { ...question(), kind }, (event) => {
    if (event.event === "error") $("keep-progress").textContent = event.text;
    if (event.event !== "file") return;
    $("keep-progress").textContent = `${event.name} is saved.`;
    saveAs(event.name, event.content, event.type);
  });
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const from = $(button.dataset.copy);
    from.select();
    await navigator.clipboard.writeText(from.value).catch(() => document.execCommand("copy"));
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

// --- tokens ------------------------------------------------------------------------------

const SCOPES = { in: "move", out: "read" };
function drawTokens() {
  const one = shownOf(state.layer);
  if (!one?.row || shows($("in"), one.row, state.layer, state.move, state.read)) return;
  for (const side of Object.keys(SCOPES)) {
    const box = $(side);
    const chosen = indices(state[SCOPES[side]], one.words.length);
    const focus = [...box.children].indexOf(document.activeElement);
    const current = Math.max(0, [...box.children].findIndex((e) => e.tabIndex === 0));
    box.replaceChildren(...spans(one.words, one.row[side], one.row.norm).flatMap((span, k) => {
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", String(chosen.includes(k)));
      span.tabIndex = k === Math.min(current, one.words.length - 1) ? 0 : -1;
      const [, blank, word] = /^( ?)(.*)$/s.exec(one.words[k]);
      if (!word) return [span];
      span.textContent = word;
      return [blank, span];  // otherwise a leading blank would be shaded at a line end
    }));
    if (focus >= 0) box.children[Math.min(focus, box.children.length - 1)]?.focus();
  }
  $("about-in").textContent = $("about-out").textContent = layerName(state.layer);
  document.querySelector(".ramp-ends").textContent = `${toLargest(one.row.in)} above, ${toLargest(one.row.out)} below, by its cube root`;
  $("moving").textContent = state.move === "all" ? "" : `Moves: ${state.move}.`;
  $("reading").textContent = state.read === "all" ? "" : `Read: ${state.read}.`;
}

// Tokens in the syntax of `measure`, and back.
function indices(scope, n) {
  const every = [...Array(n).keys()];
  if (scope === "all") return every;
  if (scope === "not-first") return every.slice(1);
  return scope.split(",").flatMap((part) => { const [a, b] = part.split(":").map(Number); return every.slice(a, (b ?? a) + 1); });
}
function scopeOf(chosen, n) {
  const some = [...chosen].sort((a, b) => a - b);
  if (!some.length || some.length === n) return "all";
  if (some.length === n - 1 && some[0] === 1) return "not-first";
  const runs = [];
  for (const k of some) if (runs.at(-1)?.[1] === k - 1) runs.at(-1)[1] = k; else runs.push([k, k]);
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}:${b}`)).join(",");
}

function scoped(side, chosen) {
  const n = $(side).children.length;
  state[SCOPES[side]] = scopeOf(chosen, n);
  controls();
  drawTokens();
  askAll();
}
const range = (a, b) => [...Array(Math.abs(b - a) + 1).keys()].map((k) => k + Math.min(a, b));
function clickedToken(side, k) {
  const n = $(side).children.length;
  const chosen = new Set(indices(state[SCOPES[side]], n));
  if (side === "in") {
    if (chosen.has(k)) chosen.delete(k); else chosen.add(k);
    return scoped(side, chosen);
  }
  return scoped(side, chosen.size === 1 && chosen.has(k) ? [] : [k]);
}

let drag = null;
for (const side of Object.keys(SCOPES)) {
  const box = $(side);
  const indexAt = (event) => [...box.children].indexOf(document.elementFromPoint(event.clientX, event.clientY)?.closest("[role=option]"));
  const mark = (a, b) => [...box.children].forEach((e, k) => e.classList.toggle("dragged", a !== null && range(a, b).includes(k)));
  box.addEventListener("pointerdown", (event) => {
    const k = indexAt(event);
    if (k < 0 || event.button) return;
    drag = { side, from: k, to: k };
    box.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  box.addEventListener("pointermove", (event) => {
    if (drag?.side !== side) return;
    const k = indexAt(event);
    if (k >= 0) drag.to = k;
    if (drag.to !== drag.from) mark(drag.from, drag.to);
  });
  box.addEventListener("pointerup", () => {
    if (drag?.side !== side) return;
    const { from, to } = drag;
    drag = null;
    mark(null);
    rove(box, to);
    if (from === to) clickedToken(side, from); else scoped(side, range(from, to));
  });
  box.addEventListener("pointercancel", () => { drag = null; mark(null); });
  let anchor = null;
  box.addEventListener("keydown", (event) => {
    const k = [...box.children].indexOf(document.activeElement);
    const last = box.children.length - 1;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? last : step ? Math.min(Math.max(k + step, 0), last) : null;
    if (k < 0) return;
    if (next !== null) {
      anchor = event.shiftKey ? anchor ?? k : null;
      rove(box, next);
      if (anchor !== null) mark(anchor, next);
      event.preventDefault();
    } else if (event.key === " " || event.key === "Enter") {
      mark(null);
      if (anchor === null || anchor === k) clickedToken(side, k); else scoped(side, range(anchor, k));
      anchor = null;
      event.preventDefault();
    } else if (event.key === "Escape") {
      anchor = null;
      mark(null);
      scoped(side, []);
    }
  });
}
function rove(box, k) {
  [...box.children].forEach((e, i) => { e.tabIndex = i === k ? 0 : -1; });
  box.children[k]?.focus({ preventScroll: true });
}

// --- controls ----------------------------------------------------------------------------

// Show the name of tokens without text, such as [CLS].
function firstToken() {
  const word = layersShown().map(shownOf).find((one) => one?.words)?.words[0]?.trim() ?? "";
  return /^[[<]/.test(word) ? word : "the first token";
}
const MAPS = ["attention", "heads", "normed", "residual", "block", "model"];
const METRICS = ["frobenius", "token-relative", "max-token", "infinity"];
const MASKS = [["own", "as the model has it"], ["yes", "causal"], ["no", "none"]];
function choose(change) {
  Object.assign(state, change);
  controls();
  askAll();
}
function chooseModel(model) {
  if (state.among === linesFor(state.model)) $("among").value = linesFor(model);
  choose({ model, among: $("among").value });
}
function controls() {
  const nameOf = (e) => e.closest("label")?.firstChild.textContent ?? e.textContent;
  const focused = document.activeElement?.closest?.("#controls") ? nameOf(document.activeElement) : null;
  const plain = (some) => some.map((one) => [one, one]);
  fill("controls",
    D.models.length > 1 ? select("Model", state.model, D.models.map((m, k) => [k, m.name]), chooseModel) : null,
    toggle(`Without ${firstToken()}`, state.move === "not-first", (on) => choose({ move: on ? "not-first" : "all" })),
    toggle("Single heads", state.heads, (heads) => { state.heads = heads; controls(); remember(); askHeads(); }),
    select("Mask", state.mask, MASKS, (mask) => choose({ mask })),
    select("Map", state.map, plain(MAPS), (map) => choose({ map })),
    select("Metric", state.metric, plain(METRICS), (metric) => choose({ metric })),
    state.move === "all" && state.read === "all" ? null
      : make("button", { type: "button", onclick: () => { choose({ move: "all", read: "all" }); $("text").focus(); } }, "Move and read all"));
  $("model-name").textContent = D.models[state.model].name;
  if (focused) [...document.querySelectorAll("#controls :is(select, button)")].find((e) => nameOf(e) === focused)?.focus();
}
const toggle = (name, on, change) => make("button", { type: "button", "aria-pressed": String(on), onclick: () => change(!on) }, name);

const EXAMPLES = [
  ["A famous beginning", "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."],
  ["A contradiction", "The film was not good, and nobody who saw it said that it was not bad."],
  ["One word again and again", "never never never never never never never never never never"],
  ["A question with its answer", "What is the capital of France? The capital of France is Paris."],
  ["Code", "def area(r):\n    return 3.14159 * r ** 2"],
];

// --- the view as a link --------------------------------------------------------------------

let later = 0;
function remember() {
  clearTimeout(later);  // a browser refuses to write twenty addresses a second
  later = setTimeout(() => history.replaceState(null, "", `#${fragment()}`), 250);
}
function fragment() {
  const view = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (name in FIRST && (value !== FIRST[name] || name === "text")) view.set(name, value ?? "");
  return view.toString();
}
function restored() {
  const found = { ...FIRST };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (!Object.hasOwn(FIRST, name)) continue;
    found[name] = ["model", "layer", "second", "along", "size"].includes(name) ? (value === "" ? null : Number(value)) : name === "heads" ? value === "true" : value;
  }
  for (const name of ["model", "second"]) if (!D.models[found[name]]) found[name] = 0;
  Object.assign(state, found);
  $("text").value = state.text;
  $("beside").value = state.beside;
  $("among").value = state.among;
  themed();
  controls();
  drawPanels();
  certifyControls(false);
  askAll();
}

// --- the page begins -------------------------------------------------------------------------

$("theme").addEventListener("click", nextTheme);
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("text").addEventListener("input", () => { state.text = $("text").value; Object.assign(state, { move: keeps(state.move), read: keeps(state.read) }); controls(); askAll(); });
// Tokens chosen by position do not apply to another text.
const keeps = (scope) => (["all", "not-first"].includes(scope) ? scope : "all");
$("examples").append(select("Examples", null, [[null, "Choose …"], ...EXAMPLES.map(([name, text]) => [text, name])],
  (text) => { if (text) { $("text").value = text; choose({ text, move: keeps(state.move), read: keeps(state.read) }); } }));
$("beside").addEventListener("input", () => { state.beside = $("beside").value; remember(); askBeside(); });
$("among").addEventListener("input", () => { state.among = $("among").value; remember(); stale(); });
$("among").addEventListener("change", askPanel);
if (D.models.length > 1) {
  $("beside-model").append(select("Second model", state.second, D.models.map((m, k) => [k, m.name]), (k) => { state.second = k; remember(); askBeside(); }));
}
window.addEventListener("hashchange", restored);
restored();
