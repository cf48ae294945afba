// Edits of a text: what recipes did to all windows, and each text with what was taken out and put in.
$("edits").hidden = !D.edits.length;
const PIECES = { "": (text) => text, "-": (text) => make("del", {}, text), "+": (text) => make("ins", {}, text) };
const editsName = (e) => `${D.settings[e.s].model}, layer ${e.layer}, ${e.n} tokens: output of the ${e.target}`
  + (e.decided ? ", a decision" : "");
DRAWERS.push(() => {
  const e = D.edits[state.edited] ?? D.edits[0];
  if (!e) return;
  fill("edits-controls", D.edits.length > 1 ? select("Edits of", D.edits.indexOf(e),
    D.edits.map((one, k) => [k, editsName(one)]), (edited) => choose({ edited })) : editsName(e));
  const rate = (r) => (r.rate === null ? "–" : `${percent(r.rate)} [${percent(r.low)}, ${percent(r.high)}]`);
  fill("recipes", heading("recipe", ["texts", "number"], ["skipped", "number"], ["succeeded", "number"],
    ["rate, 95 %", "number"], ["edits", "number"], ["queries", "number"], ["change of the layer", "number"],
    ["of the model", "number"]),
  make("tbody", {}, ...e.summary.map((r) => make("tr", {}, cell(r.recipe), cell(r.originals, "number"),
    cell(r.skipped, "number"), cell(r.succeeded, "number"), cell(rate(r), "number"), cell(number(r.changed, 2), "number"),
    cell(number(r.queries, 3), "number"), cell(percent(r.change_layer), "number"), cell(percent(r.change_model), "number")))));
  const decided = (one) => (one.decision === null ? "" : ` ${one.decision} → ${one.decided}`);
  fill("edited", heading(["window", "number"], "recipe", "", ["layer", "number"], ["model", "number"],
    ["first order", "number"], "text"),
  make("tbody", {}, ...e.edits.map((one) => make("tr", {}, cell(one.sample, "number"), cell(one.recipe),
    cell(one.status + decided(one)), cell(percent(one.change_layer), "number"), cell(percent(one.change_model), "number"),
    cell(percent(one.predicted), "number"),
    make("td", { class: "edited" }, ...one.pieces.map(([sign, text]) => PIECES[sign](text)))))));
  $("edits-note").textContent = "Changes are relative, ‖f(X′) − f(X)‖ / ‖f(X)‖; means over what succeeded; to first "
    + "order: what the Jacobian predicts for the target. Succeeded: "
    + (e.decided ? "the decision changed" : "a text with edits was found") + "; rates with Clopper–Pearson intervals. "
    + (e.edits.length < e.count ? `The ${e.edits.length} largest of ${e.count} edits.` : "The largest change first.");
});
