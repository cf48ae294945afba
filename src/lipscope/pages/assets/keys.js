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
  const top = box.getBoundingClientRect().y;
  const seen = new Set();
  return marks.filter((m, k) => {  // a mark may stand in the middle of another
    const { datum } = m.e.__data__;
    const name = markOf(datum);
    m.key = name ? `${name} ${datum[name]} ${Math.round((m.y - top) / 8)}` : `${k}`;
    return seen.size < seen.add(m.key).size;
  });
}

// Where the reader stands, by what the mark stands for: a chart drawn anew has other elements.
let at = { box: null, key: null };
const standing = (box, marks) => (at.box === box ? marks.find((m) => m.key === at.key) : undefined);
const leave = () => { document.querySelectorAll(".at").forEach((e) => e.classList.remove("at")); at = { box: null, key: null }; };

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

document.addEventListener("keydown", (event) => {
  const box = event.target;
  if (!box.classList?.contains("chart") || event.ctrlKey || event.metaKey || event.altKey) return;
  const marks = marksOf(box);
  const now = standing(box, marks);
  if (event.key === "Enter" && now) clicked(now.e.__data__.datum);
  if (event.key === "Escape") leave();
  if (!(event.key in STEPS || event.key in UPWARD || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  const next = moved(marks, now, event.key);
  if (next) stand(box, next);
});
function stand(box, mark) {
  leave();
  at = { box, key: mark.key };
  mark.e.classList.add("at");
  const item = mark.e.__data__;
  showTip(explain(item.datum, item.tooltip), mark.x, mark.y);
}
// Scrolling and drawing anew hide what was told; it is told again.
function toldAgain() {
  const box = document.activeElement;
  const now = box === at.box && standing(box, marksOf(box));
  if (now) stand(box, now);
}
document.addEventListener("scrollend", toldAgain);
document.addEventListener("focusout", (event) => {
  if (event.target.classList?.contains("chart")) { leave(); hideTip(); }
});
