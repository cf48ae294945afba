// Charts from the keyboard: arrows go from mark to mark, Enter chooses as a click does.
function reachable(box) {
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-roledescription", "chart: arrow keys go from mark to mark, Enter chooses");
}

function marksOf(box) {
  const marks = [...box.querySelectorAll(".role-mark > *")]
    .filter((e) => (e.__data__?.tooltip ?? null) !== null)
    .map((e) => { const r = e.getBoundingClientRect(); return { e, x: r.x + r.width / 2, y: r.y + r.height / 2 }; })
    .sort((a, b) => a.x - b.x || a.y - b.y);
  const seen = new Set();
  return marks.filter(({ e: { __data__: { datum } }, y }) => {  // a mark may stand in the middle of another
    const name = markOf(datum);
    const key = name ? `${name} ${datum[name]} ${Math.round(y / 8)}` : seen.size;
    return seen.size < seen.add(key).size;
  });
}

// Left and right reach every mark in turn; up and down the nearest one above or below.
const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
const UPWARD = { ArrowUp: -1, ArrowDown: 1 };
function moved(marks, now, key) {
  const at = marks.indexOf(now);
  if (key === "Home" || (!now && key in STEPS && STEPS[key] > 0)) return marks[0];
  if (key === "End" || !now) return marks.at(-1);
  if (key in STEPS) return marks[Math.min(Math.max(at + STEPS[key], 0), marks.length - 1)];
  const beyond = marks.filter((m) => (m.y - now.y) * UPWARD[key] > 1);
  const far = (m) => Math.abs(m.y - now.y) + 3 * Math.abs(m.x - now.x);
  return beyond.sort((a, b) => far(a) - far(b))[0] ?? now;
}

const unmark = (box) => box.querySelectorAll(".at").forEach((e) => e.classList.remove("at"));
document.addEventListener("keydown", (event) => {
  const box = event.target;
  if (!box.classList?.contains("chart") || event.ctrlKey || event.metaKey || event.altKey) return;
  const marks = marksOf(box);
  const now = marks.find((m) => m.e.classList.contains("at"));
  if (event.key === "Enter" && now) clicked(now.e.__data__.datum);
  if (event.key === "Escape") unmark(box);
  if (!(event.key in STEPS || event.key in UPWARD || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  const next = moved(marks, now, event.key);
  if (!next) return;
  unmark(box);
  next.e.classList.add("at");
  tell(next);
});
function tell({ e, x, y }) {
  const item = e.__data__;
  showTip(explain(item.datum, item.tooltip), x, y);
}
// Scrolling hides what stands under the mouse; what the keyboard is at is told again.
document.addEventListener("scrollend", () => {
  const box = document.activeElement;
  const now = box?.classList.contains("chart") && marksOf(box).find((m) => m.e.classList.contains("at"));
  if (now) tell(now);
});
document.addEventListener("focusout", (event) => {
  if (event.target.classList?.contains("chart")) { unmark(event.target); hideTip(); }
});
