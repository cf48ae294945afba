// Everything that is no chart: key figures, shaded text, tables, notes.
// --- overview ------------------------------------------------------------------------------

function drawFigures() {
  const c = card();
  $("said").textContent = c ? c.said ?? "Too many curves for a sentence on each." : "";
  if (!c || c.sigma === undefined) return fill("figures");
  const fit = fits.find((f) => real(f) && f.layer === state.layer);
  const parts = [
    ["sigma", number(c.sigma, 3), `${c.upper === null ? "" : "in "}${ends(c)}, at ${c.n} tokens`],
    ["relative", number(c.relative, 3), "relative change out for one in, to first order"],
    ["top token", percent(c.share), c.word ? `on “${c.word.trim()}” (${c.token})` : `token ${c.token}`],
    c.rest === null ? null : ["without it", number(c.rest, 3), "sigma with that token fixed"],
    fit ? ["growth", fit.fits === false ? "no power law" : make("span", {}, fit.nearly ? "≈ n" : "n",
      make("sup", {}, fit.slope.toFixed(2))),
      fit.fits === false ? `${fit.deviation}; slopes ${fit.local.map((s) => s.toFixed(2)).join(", ")}`
        : `${interval(fit).trim()} ${fit.interval}${fit.nearly ? `; ${fit.deviation}` : ""}`.trim()] : null,
    c.rank === null ? null : ["stable rank", number(c.rank, 3), "directions as bad as the worst"],
  ];
  return fill("figures", ...parts.filter(Boolean).map(([name, value, about]) => make("div", {},
    make("dt", {}, name), make("dd", {}, value, make("small", {}, about)))));
}

// --- text ----------------------------------------------------------------------------------

function drawText() {
  const w = D.windows[state.picked];
  const p = points[state.picked];
  for (const about of document.querySelectorAll(".about-window")) {
    about.textContent = p && w ? `${layerName(p.layer)}, ${headName(p.head)}, ${p.n} tokens, window `
      + `${p.sample}: sigma ${enclosed(p)}.` : " None.";
  }
  for (const box of document.querySelectorAll(".shaded[data-side]")) {
    const side = box.dataset.side;
    box.classList.toggle("none", !w);
    if (!w) box.replaceChildren("The tokens of this selection were not kept.");
    else box.replaceChildren(...spans(D.texts[w.text], w[side], w.norm));
  }
  document.querySelector(".ramp-ends").textContent = w ? `${toLargest(w.in)}, by its cube root` : "";
  drawTokens(w);
}

function drawTokens(w) {
  if (!w) return fill("tokens");
  const words = D.texts[w.text];
  $("sensitivity-note").textContent = words.length > w.most.length
    ? "The eight tokens with the largest shares of the right singular vector (share in); all others "
      + `together have ${percent(w.others)} of it.`
    : "All tokens, by their share of the right singular vector (share in).";
  return list("tokens", w.most, [["token", (k) => k, "number"], ["text", (k) => words[k].trim()],
    ["share in", (k) => percent((w.in[k] ?? 0) / D.scale), "number"],
    ["share out", (k) => ((w.out[k] ?? null) === null ? "–" : percent(w.out[k] / D.scale)), "number"],
    ["norm", (k) => number(w.norm[k]), "number"]]);
}

// --- directions in words ---------------------------------------------------------------------

function drawWords() {
  const found = D.directions[state.picked] ?? [];
  const d = found.find((one) => one.rank === state.rank) ?? found[0];
  if (!d) {
    for (const id of ["words-controls", "words-tokens", "words-heads"]) fill(id);
    for (const id of ["words-about", "words-turns"]) $(id).textContent = "";
    $("words-note").textContent = "No directions of this window. They come from lipscope directions … --out DIR.";
    return;
  }
  fill("words-controls", select("Direction", d.rank, found.map((one) => [one.rank,
    one.rank === 1 ? "1, the worst" : one.rank]), (rank) => choose({ rank })));
  $("words-about").textContent = `${d.said[0].toUpperCase()}${d.said.slice(1)}.`;
  fill("words-tokens", ...VERBS.map(([side, verb]) => make("div", {}, make("h3", {}, verb),
    ...d.tokens.filter((t) => t.side === side).map(wordsOf))));
  $("words-turns").textContent = d.turns && `${d.turns[0].toUpperCase()}${d.turns.slice(1)}.`;
  drawHeadParts(d.heads);
  $("words-note").textContent = "Readings by their cosine with the vector at this token, the nearest first. "
    + "Chance: the largest of 99 random directions; a vector that no reading is nearer to reads as nothing, "
    + "and a random one is nearer once in a hundred times. Spanned: by the ten nearest readings together.";
}

// --- growth --------------------------------------------------------------------------------

function drawLegend() {
  const { layers } = setting();
  for (const key of document.querySelectorAll(".layers")) {
    key.replaceChildren(...layers.length < 2 ? [] : ["layer",
      ...layers.map((l) => make("span", {}, swatch(l), l))]);
  }
  layerButtons("legend", layers, state.front, (layer) => choose(layer === null ? { front: null } : { layer, front: layer }));
}
// Buttons that bring a layer to the front, or all; the one in use keeps the keyboard.
function layerButtons(id, layers, front, choice) {
  const button = (layer, text) => make("button", { type: "button", "aria-pressed": String(front === layer),
    onclick: () => { choice(layer); [...$(id).children].find((b) => b.textContent === text)?.focus(); },
  }, layer === null ? null : swatch(layer), text);
  fill(id, ...layers.length < 2 ? [] : [button(null, "all layers"), ...layers.map((l) => button(l, l))]);
}
function swatch(layer) {
  const mark = make("i");
  mark.style.setProperty("--c", `var(--l${D.layers.indexOf(layer)})`);
  return mark;
}

function drawFits() {
  const rows = setting().layers.map((layer) => {
    const of = (kind) => fits.find((f) => here(f) && f.layer === layer && f.kind === kind);
    return [layer, of("real"), of("rest"), of(state.built)];
  }).filter(([, ...found]) => found.some(Boolean));
  const exponent = (f) => (!f ? "–" : f.slope.toFixed(2) + interval(f));
  return list("fits", rows, [["layer", ([layer]) => layer, "number"],
    ["exponent", ([, f]) => exponent(f) + (f?.fits === false ? " (no power law)" : ""), "whole"],
    ["top token fixed", ([, , rest]) => exponent(rest), "whole"],
    [state.built ?? "adversarial", ([, , , worst]) => exponent(worst), "whole"],
    ["interval", ([, f]) => f?.interval ?? "–"], ["means from the line", ([, f]) => f?.deviation ?? "–"],
    ["local slopes", ([, f]) => (f ? f.local.map((s) => s.toFixed(2)).join("  ") : "–")],
    ["samples", ([, f]) => (f ? f.samples : "–"), "number"], ["", ([, f]) => f?.note ?? "", "text"]],
  ([layer]) => layer === state.layer);
}

function drawGrowthNotes() {
  const all = points.filter(real).length;
  const delta = setting().deltas.map((d) => d.toExponential()).join(" or ");
  $("focus-about").textContent = focusAbout();
  $("focus-note").textContent = `Points are single windows, side by side around their length; bars reach `
    + `up to the upper end of the interval (each fails with probability at most ${delta}). Lines: `
    + "geometric means." + (points.some((p) => real(p) && p.rest !== null) ? ""
      : " Sigma without the top token was not measured: add --rest.");
  $("real-note").textContent = all > MANY ? `${MANY.toLocaleString("en")} of ${all.toLocaleString("en")} `
    + "points are drawn, evenly chosen; lines are of all." : "";
  $("adversarial-title").textContent = !state.built || state.built === "adversarial"
    ? "Adversarial inputs" : `Built inputs: ${state.built}`;
  $("built-key").textContent = state.built ?? "adversarial";
  const kinds = kindsBuilt();
  fill("growth-controls", kinds.length < 2 ? null
    : select("Built input", state.built, kinds.map((k) => [k, k]), (built) => choose({ built })));
  $("adversarial-note").textContent = !points.some(other) ? "" : state.built === "adversarial"
    ? "The worst inputs found, on the same axes. A lower bound on the worst case, not a proof that nothing is "
      + "worse." : "On the same axes; inputs of other kinds are not in these curves.";
  const levels = distinct(fits.filter(here).map((f) => f.interval)).join("; ");
  $("exponents-note").textContent = !levels ? "" : `Dashed: 1/4 and 1/2. Bars: ${levels}, for the sampling of text: how the `
    + "exponent moves when other passages are drawn, independent of each other, not how exact a single "
    + "sigma is.";
}

// --- training ------------------------------------------------------------------------------

function drawTraining() {
  const lengths = stepLengths();
  const one = group();
  $("training-about").textContent = one ? `${one.name}, map ${setting().map}, ${headName(state.head)}, `
    + `${trained()} tokens` : "";
  $("training-note").textContent = one ? "Lines: geometric means over windows. Bars: up to the upper end "
    + "of the solver's interval and, from two windows on, 95 % for the sampling of text (Student, for nearly "
    + "normal log sigma), where windows share none. Small points: "
    + "single windows of the layer in front." : "";
  return fill("training-controls", lengths.length ? chooseLength("Length at each step", trained(), lengths, "trained") : null);
}

// --- heads, bounds -------------------------------------------------------------------------

const QUANTITIES = [["sigma", "sigma"], ["relative", "relative"], ["share", "share of the top token"]];
function drawHeadControls() {
  const lengths = headLengths();
  $("heatmap-about").firstChild.textContent = lengths.length
    ? `${QUANTITIES.find(([q]) => q === state.quantity)[1]} at ${headLength()} tokens` : "";
  if (!lengths.length) return fill("heads-controls");
  return fill("heads-controls",
    select("Colour", state.quantity, QUANTITIES, (quantity) => choose({ quantity })),
    chooseLength("Length", headLength(), lengths, "length"));
}

function drawBounds() {
  const all = boundsHere();
  const b = sandwich();
  $("bounds-more").hidden = !b;
  $("bounds-about").firstChild.textContent = b
    ? `Layer ${b.layer}, ${headName(b.head)}, map ${b.map}, metric ${b.metric}` : "";
  if (!b) {
    fill("sandwich-controls");
    $("bounds-note").textContent = "";
    return;
  }
  const metrics = distinct(all.map((x) => x.metric)).map((m) => [m, m]);
  const places = all.filter((x) => x.metric === b.metric).map((x) => [placeOf(x),
    `layer ${x.layer}, ${headName(x.head)}, map ${x.map}`
      + (distinct(all.map((y) => y.folder)).length > 1 ? `, folder ${x.folder}` : "")]);
  fill("sandwich-controls",
    select("Metric of the bounds", b.metric, metrics, (metric) => choose({ metric })),
    select("Layer of the bounds", placeOf(b), places, (place) => choose({ place })));
  const out = b.out.length ? ` Off the scale: ${b.out.join(", ")}.` : "";
  const unmeasured = b.measured ? "" : " Sigma was not measured in this metric: lipscope bounds … "
    + `--metric ${b.metric} does.`;
  $("bounds-note").textContent = `Dashed: bounds for all inputs, ${b.allowed}.${out}${unmeasured}`;
  list("bounds-table", b.table, [["theorem", (t) => t.theorem],
    ["statement", (t) => t.statement + (t.sound ? "" : " (as found; fails)")], ["source", (t) => t.cite],
    ["kind", (t) => t.kind], ["scope", (t) => t.scope],
    ["value", (t) => (t.kind === "measured" ? ends({ sigma: t.value, upper: t.upper })
      : t.value === null ? "–" : t.kind === "lower" ? `≥ ${downward(t.value)}` : `≤ ${upward(t.value)}`), "number"],
    ["× sigma", (t) => number(t.times, 3), "number"], ["note", (t) => t.why, "text"]]);
}

// --- worst cases ---------------------------------------------------------------------------

const SORTS = [["sigma", "sigma"], ["relative", "relative"], ["share", "share of the top token"],
  ["radius", "radius"], ["loose", "width of the interval"]];
const MOST = 20;
function drawWorst() {
  const value = (p) => (state.sort === "loose" ? (p.upper ?? Infinity) / p.sigma : p[state.sort]) ?? -1;
  const kinds = setting().kinds.map((k) => [k, k === "real" ? "real" : k]);
  if (!setting().kinds.includes(state.kind)) state.kind = kinds[0][0];
  const some = points.filter((p) => ours(p) && p.kind === state.kind && p.sigma !== null);
  const worst = [...some].sort((a, b) => value(b) - value(a)).slice(0, MOST);
  fill("worst-controls", select("Sorted by", state.sort, SORTS, (sort) => choose({ sort })),
    select("Inputs", state.kind, kinds, (kind) => choose({ kind })));
  const show = (p) => make("button", { type: "button", disabled: p.kind === "real" ? null : "",
    onclick: () => { pick(p.i); $("overview").scrollIntoView(); } }, "show");
  list("cases", worst, [["", show], ["layer", (p) => p.layer, "number"], ["head", (p) => p.head ?? "all"],
    ["tokens", (p) => p.n, "number"], ["input", inputName, "whole"], ["[sigma, upper]", ends, "whole"],
    ["relative", (p) => number(p.relative, 3), "number"],
    ["top token", (p) => (p.token === null ? "–"
      : `${D.tops[p.i] ? `“${D.tops[p.i].trim()}” ` : ""}(${p.token})`), "whole"],
    ["share", (p) => percent(p.share), "number"], ["without it", (p) => number(p.rest), "number"],
    ["stable rank", (p) => number(p.rank, 3), "number"], ["radius", (p) => number(p.radius), "number"],
    ["text", (p) => (D.begins[p.i] === null ? p.note ?? "" : `${D.excerpts[D.begins[p.i]].slice(0, 70)} …`), "text"]],
  (p) => p.i === state.picked);
  $("worst-note").textContent = `The first ${worst.length} of ${some.length.toLocaleString("en")} rows of `
    + `this setting that the page carries. ${D.remarks.join(" ")}`;
}

// --- everything ----------------------------------------------------------------------------

let turn = 0;
async function drawAll() {
  const mine = ++turn;
  document.documentElement.dataset.drawn = "";
  hideTip();  // what is drawn anew under the mouse does not say that it has gone
  drawFigures();
  drawText();
  drawWords();
  drawLegend();
  drawFits();
  drawGrowthNotes();
  for (const id of Object.keys(CHARTS)) {
    placed(id);
    if (mine !== turn) return;
    await draw(id);
    await new Promise((done) => setTimeout(done));  // let the reader's next click through
  }
  drawTraining();
  drawHeadControls();
  drawBounds();
  drawWorst();
  DRAWERS.forEach((one) => one());
  if (mine !== turn) return;
  toldAgain();
  document.documentElement.dataset.drawn = "yes";
}

function watchContents() {
  const sections = [...document.querySelectorAll("main section:not([hidden])")];
  const links = new Map(sections.map((s) => [s.id, make("a", { href: `#${s.id}` },
    s.querySelector("h2").textContent)]));
  $("contents").lastElementChild.replaceChildren(...[...links.values()].map((a) => make("li", {}, a)));
  const seen = new IntersectionObserver((entries) => {
    for (const e of entries) links.get(e.target.id)?.classList.toggle("here", e.isIntersecting);
  }, { rootMargin: "-15% 0px -75% 0px" });
  sections.forEach((s) => seen.observe(s));
}
