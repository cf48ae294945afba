// Pushes: one chart, and a slider over the sizes at which the model was run.
// A link may name what this page does not have.
const pushed = () => D.pushes[state.push] ?? D.pushes[0];
const course = () => pushed()?.directions[state.along] ?? pushed()?.directions[0];
const pushSteps = () => course()?.steps ?? [];
const pushStep = () => pushSteps()[state.size] ?? pushSteps().at(-1);
const pushSay = () => `Change of the output against the size of the move: ${pushed()?.name ?? ""}`;

CHARTS.push = { spec: "push", say: pushSay,
  data: () => ({ curves: pushed()?.curves ?? [], sizes: pushed()?.sizes ?? [] }),
  signals: () => ({ at: pushStep()?.eps ?? null }),
  empty: "No pushes in these folders. They come from lipscope push … --out DIR." };

const KEY = { "sigma · size": "ink dashed", "certificate, any move": "ink dotted",
  "map, along +v": "blue-line", "map, along −v": "blue-line dashed",
  "map, along +top token": "orange-line", "map, along −top token": "orange-line dashed",
  "map, random (mean, range)": "quiet-line", "block, along +v": "green-line",
  "model, along +v": "purple-line" };

function drawPush() {
  const p = pushed();
  if (!p) return;
  const steps = pushSteps();
  const now = pushStep();
  fill("push-controls",
    D.pushes.length < 2 ? null : select("Pushed", D.pushes.indexOf(p), D.pushes.map((o, k) => [k, o.name]),
      (push) => { Object.assign(state, { push, along: 0, size: 0 }); drawPushed(); }),
    select("Pushed along", p.directions.indexOf(course()), p.directions.map((d, k) => [k, d.name]),
      (along) => { state.along = along; drawPushed(); }));
  $("push-about").textContent = p.name;
  $("push-certified").hidden = !p.curves.some((c) => c.curve === "certificate, any move");
  const drawn = distinct(p.curves.map((c) => c.curve));
  fill("push-key", ...Object.keys(KEY).filter((name) => drawn.includes(name))
    .map((name) => make("span", {}, make("i", { class: KEY[name] }), name)));
  fill("push-said", ...p.said.map((text) => make("li", {}, text)));
  const slider = $("push-at");
  slider.max = steps.length - 1;
  slider.value = steps.indexOf(now);
  slider.setAttribute("aria-valuetext", sizeOf(now));
  fill("push-now", ...pushNow(p, now));
  const numbers = { size: "eps", "mean token norms": "relative", "sigma · size": "promise", certificate: "certificate",
    map: "layer", block: "block", model: "model" };
  list("push-table", steps, [...Object.entries(numbers).map(([name, key]) => [name,
    (s) => (key === "certificate" ? upward : number)(s[key]), "number"]),
  [p.reading || "", (s) => (s.reads.length ? shownWord(s.reads[0][0]) : "")],
  [p.decision === null ? "" : "decision", (s) => s.decision ?? ""]], (s) => s === now);
}

DRAWERS.push(drawPush);

async function drawPushed() {
  document.documentElement.dataset.drawn = "";
  drawPush();
  await draw("push");
  remember();
  document.documentElement.dataset.drawn = "yes";
}

const sizeOf = (s) => `${number(s.eps, 3)}, ${number(s.relative, 3)} mean token norms`;
// Blanks are part of a token: a leading one is shown as what is not a letter.
const shownWord = (text) => text.replace(/^ /, "␣").replaceAll("\n", "↵");

function pushNow(p, s) {
  const off = s.layer === null || !s.promise ? null : s.layer / s.promise;
  const facts = [["size", sizeOf(s)],
    ["map", `${number(s.layer)}${off === null ? "" : `, ${number(off, 3)} × sigma · size`}`],
    s.certificate === null ? null : ["certified", `at most ${upward(s.certificate)}`],
    s.block === null ? null : ["block", number(s.block)],
    s.model === null ? null : ["model", number(s.model)],
    s.decision === null ? null : ["decision", s.decision + (s.decision === p.decision ? "" : " (changed)")]];
  const first = p.reads.length ? p.reads[0][0] : null;
  const cosine = p.reading === "nearest text";
  const bars = s.reads.map(([text, value]) => {
    const bar = make("i", {});
    bar.style.setProperty("--share", `${(100 * Math.max(value, 0)).toFixed(1)}%`);
    return make("tr", { class: text === first ? "first" : null }, cell(shownWord(text), "word"),
      make("td", { class: "bar" }, bar), cell(cosine ? number(value, 3) : percent(value), "number"));
  });
  return [make("dl", { class: "facts" }, ...facts.filter(Boolean)
    .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
  bars.length ? make("table", { class: "reads" }, make("caption", {}, CAPTIONS[p.reading]),
    make("tbody", {}, ...bars)) : null,
  ...patches(course().pixels, s.eps)].filter(Boolean);
}

const CAPTIONS = {
  "next token": "The five likeliest next tokens; bold: the likeliest one at X",
  "nearest text": "The nearest texts, by cosine; bold: the nearest one at X",
  "most changed patch": "The tokens whose outputs change most, by their share of the squared change",
};

// The picture at this size; the patch that moves most, as it was and as it is: from 0 to 1, cut there.
function patches(pixels, eps) {
  if (!pixels) return [];
  const drawn = (size, name, whole = false) => make("figure", { class: whole ? "whole" : null },
    (whole ? canvasOfAll : canvas)(pixels, size, name), make("figcaption", {}, name));
  const cut = pixels.before.some((c, k) => c.some((row, i) => row
    .some((v, j) => Math.abs(v + eps * pixels.move[k][i][j] - 0.5) > 0.5)));
  return [make("div", { class: "patches" }, ...pixels.picture ? [drawn(eps, "the picture at this size", true)] : [],
    drawn(0, `${pixels.name}, as it was`),
    drawn(eps, `at this size${cut ? ", colours cut to what a screen has" : ""}`))];
}

const decoded = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
function canvasOfAll({ picture, moves, scale, at, before }, eps, name) {
  const [held, moved, channels] = [decoded(picture.bytes), decoded(moves.bytes), before.length];
  const box = painted(picture.width, picture.height, name, channels, (i, c) => {
    const k = i * channels + c;
    return held[k] + 255 * eps * scale * (moved[k] - 128) / 127;
  });
  const pen = box.getContext("2d");
  pen.strokeStyle = "#ff7a1a";
  pen.strokeRect(at[1] - 0.5, at[0] - 0.5, before[0].length + 1, before[0].length + 1);
  return box;
}

function canvas({ before, move }, eps, name) {
  const side = before[0].length;
  return painted(side, side, name, before.length, (i, c) => {
    const [row, column] = [Math.floor(i / side), i % side];
    return 255 * (before[c][row][column] + eps * move[c][row][column]);
  });
}

// A canvas, and of each pixel and channel its value up to 255; one channel is grey.
function painted(width, height, name, channels, valueOf) {
  const box = make("canvas", { width, height, role: "img", "aria-label": name });
  const image = new ImageData(width, height);
  for (let i = 0; i < height * width; i += 1) {
    for (let c = 0; c < 3; c += 1) image.data[4 * i + c] = valueOf(i, Math.min(c, channels - 1));
    image.data[4 * i + 3] = 255;
  }
  box.getContext("2d").putImageData(image, 0, 0);
  return box;
}

$("push-at").addEventListener("input", (e) => { state.size = Number(e.target.value); drawPushed(); });
