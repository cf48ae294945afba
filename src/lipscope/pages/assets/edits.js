// Edits of a text: what recipes did to all windows, and each text with what was taken out and put in.
$("edits").hidden = !D.edits.length;
const PIECES = { "": (text) => text, "-": (text) => make("del", {}, text), "+": (text) => make("ins", {}, text) };
const editsName = (e) => `${D.settings[e.s].model}, layer ${e.layer}, ${e.n} tokens: output of the ${e.target}`
  + (e.decided ? ", a decision" : "") + (e.source ? `, folder ${e.source}` : "");
DRAWERS.push(() => {
  const e = D.edits[state.edited] ?? D.edits[0];
  if (!e) return;
  fill("edits-controls", D.edits.length > 1 ? chooseRecord("Edits of", D.edits, e, editsName, "edited") : editsName(e));
  const rate = (r) => (r.rate === null ? "–" : `${percent(r.rate)}${r.low === null ? "" : ` [${percent(r.low)}, ${percent(r.high)}]`}`);
  list("recipes", e.summary, [["recipe", (r) => r.recipe], ["texts", (r) => r.originals, "number"],
    ["skipped", (r) => r.skipped, "number"], ["succeeded", (r) => r.succeeded, "number"], ["rate, 95 %", rate, "number"],
    ["edits", (r) => number(r.changed, 2), "number"], ["queries", (r) => number(r.queries, 3), "number"],
    ["change of the layer", (r) => percent(r.change_layer), "number"], ["of the model", (r) => percent(r.change_model), "number"]]);
  const decided = (one) => (one.decision === null ? "" : ` ${one.decision} → ${one.decided}`);
  list("edited", e.edits, [["window", (one) => one.sample, "number"], ["recipe", (one) => one.recipe],
    ["", (one) => one.status + decided(one)], ["layer", (one) => percent(one.change_layer), "number"],
    ["model", (one) => percent(one.change_model), "number"], ["first order", (one) => percent(one.predicted), "number"],
    ["text", (one) => one.pieces.map(([sign, text]) => PIECES[sign](text)), "edited"]]);
  $("edits-note").textContent = "Changes are relative, ‖f(X′) − f(X)‖ / ‖f(X)‖; means over what succeeded; to first "
    + "order: what the Jacobian predicts for the target. Succeeded: "
    + (e.decided ? "the decision changed" : "a text with edits was found") + "; rates with Clopper–Pearson intervals, where windows share no text. "
    + (e.edits.length < e.count ? `The ${e.edits.length} largest of ${e.count} edits.` : "The largest change first.");
});
