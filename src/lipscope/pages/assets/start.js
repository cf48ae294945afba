// The page begins: what it has nothing of is hidden, and a link may say what is shown.
$("training").hidden = !D.groups.length && !watched.length;
$("pushed").hidden = !D.pushes.length;
// What nothing was measured for leaves the page; at its end stands what would fill it.
const FILLED = { heads: [points.some((p) => p.head !== null && p.kind === "real"), "--per-head"],
  sandwich: [D.bounds.length, "lipscope bounds"],
  sensitivity: [Object.values(D.windows).some(Boolean), "tokens, which were not kept"],
  words: [Object.values(D.directions).some((d) => d?.length), "lipscope directions"],
  radius: [points.some((p) => p.radius > 0), "a radius"],
  average: [points.some((p) => p.rank > 0), "--average"] };
const absent = Object.entries(FILLED).filter(([, [some]]) => !some);
absent.forEach(([id]) => { $(id).hidden = true; });
$("absent").textContent = absent.length ? `Not measured here: ${absent.map(([id, [, how]]) =>
  `${$(id).querySelector("h2").textContent} (${how})`).join(", ")}.` : "";
$("theme").addEventListener("click", nextTheme);
$("controls").addEventListener("submit", (e) => e.preventDefault());
window.addEventListener("beforeprint", () => document.querySelectorAll("details")
  .forEach((d) => { d.open = true; }));
watchContents();
if (D.settings.length) {
  settle({ layer: null });
  Object.assign(FIRST, state);
  restored();
  window.addEventListener("hashchange", restored);
}
