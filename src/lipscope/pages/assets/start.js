// The page begins: what it has nothing of is hidden, and a link may say what is shown.
$("training").hidden = !D.groups.length;
$("pushed").hidden = !D.pushes.length;
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
