// Pushes: one chart, and a slider over the sizes at which the model was run.
Object.assign(state, { push: 0, along: 0, at: 0 });
const pushed = () => D.pushes[state.push];
const pushSteps = () => pushed()?.directions[state.along].steps ?? [];
const pushSay = () => `Change of the output against the size of the move: ${pushed()?.name ?? ""}`;

CHARTS.push = { spec: "push", say: pushSay,
  data: () => ({ curves: pushed()?.curves ?? [], sizes: pushed()?.sizes ?? [] }),
  signals: () => ({ at: pushSteps()[state.at]?.eps ?? null }),
  empty: "No pushes in these folders. They come from lipscope push … --out DIR." };

function drawPush() {
  const p = pushed();
  if (!p) return;
  const steps = pushSteps();
  state.at = Math.min(state.at, steps.length - 1);
  fill("push-controls",
    D.pushes.length < 2 ? null : select("Pushed", state.push, D.pushes.map((o, k) => [k, o.name]),
      (push) => { Object.assign(state, { push, along: 0, at: 0 }); drawPushed(); }),
    select("Direction", state.along, p.directions.map((d, k) => [k, d.name]),
      (along) => { state.along = along; drawPushed(); }));
  $("push-about").textContent = p.name;
  fill("push-said", ...p.said.map((text) => make("li", {}, text)));
  const slider = $("push-at");
  slider.max = steps.length - 1;
  slider.value = state.at;
  slider.setAttribute("aria-valuetext", sizeOf(steps[state.at]));
  fill("push-now", ...pushNow(p, steps[state.at]));
  fill("push-table", heading(["size", "number"], ["mean token norms", "number"],
    ["sigma · size", "number"], ["certificate", "number"], ["layer", "number"], ["block", "number"],
    ["model", "number"], p.reading || "", p.decision === null ? "" : "decision"),
  make("tbody", {}, ...steps.map((s, k) => make("tr", { class: k === state.at ? "front" : null },
    ...["eps", "relative", "promise", "certificate", "layer", "block", "model"]
      .map((name) => cell(name === "certificate" ? upward(s[name]) : number(s[name]), "number")),
    cell(s.reads.length ? shownWord(s.reads[0][0]) : ""), cell(s.decision ?? "")))));
}

async function drawPushed() {
  document.documentElement.dataset.drawn = "";
  const focused = document.activeElement?.closest?.("label")?.firstChild?.textContent;
  drawPush();
  if (focused) {  // made anew: give the keyboard back
    [...document.querySelectorAll("#push-controls label")]
      .find((l) => l.firstChild.textContent === focused)?.querySelector("select").focus();
  }
  await draw("push");
  document.documentElement.dataset.drawn = "yes";
}

const sizeOf = (s) => `${number(s.eps, 3)}, ${number(s.relative, 3)} mean token norms`;
// Blanks are part of a token: a leading one is shown as what is not a letter.
const shownWord = (text) => text.replace(/^ /, "␣").replaceAll("\n", "↵");

function pushNow(p, s) {
  const off = s.layer === null || !s.promise ? null : s.layer / s.promise;
  const facts = [["size", sizeOf(s)],
    ["layer", `${number(s.layer)}${off === null ? "" : `, ${number(off, 3)} × sigma · size`}`],
    s.certificate === null ? null : ["certified", `at most ${upward(s.certificate)}`],
    s.block === null ? null : ["block", number(s.block)],
    s.model === null ? null : ["model", number(s.model)],
    s.decision === null ? null : ["decision", s.decision + (s.decision === p.decision ? "" : " (changed)")]];
  const first = p.reads.length ? p.reads[0][0] : null;
  const next = p.reading === "next token";
  const bars = s.reads.map(([text, value]) => {
    const bar = make("i", {});
    bar.style.setProperty("--share", `${(100 * Math.max(value, 0)).toFixed(1)}%`);
    return make("tr", { class: text === first ? "first" : null }, cell(shownWord(text), "word"),
      make("td", { class: "bar" }, bar), cell(next ? percent(value) : number(value, 3), "number"));
  });
  return [make("dl", { class: "facts" }, ...facts.filter(Boolean)
    .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
  bars.length ? make("table", { class: "reads" }, make("caption", {}, next
    ? "The five likeliest next tokens; bold: the likeliest one at X"
    : "The nearest texts, by cosine; bold: the nearest one at X"), make("tbody", {}, ...bars)) : null,
  ].filter(Boolean);
}

$("push-at").addEventListener("input", (e) => { state.at = Number(e.target.value); drawPushed(); });
