// What a monitor read during training: the page opens on it.
const watched = D.monitored;
const readings = watched.flatMap((one) => one.rows);
const alerts = watched.flatMap((one) => one.alerts);
const watch = () => watched[state.watched] ?? watched[0];
const signalName = (signal) => signal.replaceAll("_", " ");
const ABOUT = { relative: "sigma · ‖X‖ / ‖f(X)‖", entropy: "of attention, in nats", radius: "largest token norm",
  sink_mass: "attention that one token gets", top_share: "of the most sensitive token", update_norm: "of the step", loss: "of the step" };
$("signals").hidden = !watched.length;
if (watched.length) {
  $("overview").before($("training"));
  // Below, the model as it is now, not as it was before training.
  const late = D.settings.map((s, k) => [s.step ?? -1, s.layers.length, -k]).sort((a, b) => b[0] - a[0] || b[1] - a[1] || b[2] - a[2]);
  state.s = -late[0][2];
}
registerMarks("reading", readings, (r) => choose({ seen: r.layer === "all" ? null : r.layer }),
  (r) => [make("b", {}, `step ${r.step}${r.layer === "all" ? "" : `, ${layerName(r.layer)}`}`),
    line(`${signalName(r.signal)} ${number(r.value)}`)]);
registerMarks("alert", alerts, () => null, (a) => [make("b", {}, "alert"), line(a.text)]);
COLUMNS.reading = column("value", (r) => r.value, (r) => number(r.value));
for (const signal of distinct(watched.flatMap((one) => Object.keys(one.scales)))) {
  const id = `signal-${signal}`;
  const of = (rows) => (rows ?? []).filter((r) => r.signal === signal);
  CHARTS[id] = { section: "signals", title: signalName(signal), about: ABOUT[signal], spec: () => `signal-${watch().scales[signal] ?? "linear"}`,
    say: () => `${signalName(signal)} against training step, layer by layer`,
    data: () => ({ rows: of(watch()?.rows), alerts: of(watch()?.alerts) }), signals: () => ({ axes: watch()?.axes[signal], layer: state.seen }),
    empty: "Not read in this training." };
  TABLES[id] = ["rows", "step layer reading"];
}
DRAWERS.push(() => {
  if (!watched.length) return;
  const one = watch();
  fill("watched-controls", watched.length < 2 ? null : chooseRecord("Training", watched, one, (w) => w.name, "watched"));
  const layers = D.layers.filter((l) => one.rows.some((r) => r.layer === l));
  layerButtons("watched-layers", layers, state.seen, (layer) => choose({ seen: layer }));
  $("watched-about").textContent = "What the monitor read, layer by layer. " + (one.alerts.length
    ? "Triangles are alerts, dashed lines layers that could not be measured, in float32 or at all; in words below."
    : "There were no alerts.");
  fill("alerts", ...one.alerts.length ? [make("h3", {}, "Alerts"), make("ul", {}, ...one.alerts.map((a) => make("li", {}, a.text)))] : []);
});
