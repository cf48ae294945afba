// How far each token may move before a model's decision can change.
$("decided").hidden = !D.decided.length;
const certified = () => D.decided[state.decided] ?? D.decided[0];
const certifiedName = (c) => `${D.settings[c.s].model}${c.place && `, ${c.place}`}, ${c.n} tokens, window ${c.sample}, “${c.decision}” before “${c.rival}”`;
// The smaller the radius beside the least one, the darker.
function radiusSpans(tokens) {
  const least = Math.min(...tokens.map((t) => t.radius ?? Infinity).filter((r) => r > 0));
  return tokens.map((t) => {
    const span = make("span", { title: `token ${t.index}: certified ${certifiedRadius(t)}, attack ${number(t.attack)}`,
      class: t.radius !== null && t.radius <= least ? "top" : null }, `${t.text} `);
    span.style.setProperty("--p", (t.radius === null ? 0 : t.radius > 0 ? 78 * (least / t.radius) : 78).toFixed(1));
    return span;
  });
}
DRAWERS.push(() => {
  const c = certified();
  if (!c) return;
  fill("decided-controls", chooseRecord("Decision", D.decided, c, certifiedName, "decided"));
  $("decided-about").textContent = `${certifiedName(c)} by ${number(c.margin)}, decided by ${c.by}`;
  fill("decided-text", ...radiusSpans(c.tokens));
  for (const name of ["text", "tokens"]) $(`decided-${name}`).hidden = !c.tokens.length;
  $("decided-balls").hidden = !c.balls.length;
  list("decided-tokens", c.tokens, [["token", (t) => t.index, "number"], ["text", (t) => t.text], ["rival", (t) => t.rival],
    ["certified radius", certifiedRadius, "number"], ["attack", (t) => number(t.attack), "number"],
    ["other words within", (t) => t.words ?? "–", "number"]]);
  list("decided-balls", c.balls, [["ball", (b) => (b.ball === "joint" ? "all together" : "every one by")],
    ["tokens", (b) => b.count, "number"], ["certified radius", certifiedRadius, "number"],
    ["attack", (b) => number(b.attack), "number"], ["other words within", (b) => b.words ?? "–", "number"]]);
  $("decided-note").textContent = ["Attack: the smallest move found that changes the decision. Other words within: those whose embeddings lie within the certified radius. ",
    c.tokens.length ? "Darkest: the token that may move least. " : "",
    c.stopped ? "Interrupted: a larger radius may be provable." : ""].join("");
});
