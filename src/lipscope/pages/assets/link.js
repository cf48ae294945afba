// The view as a link: behind the section, what was chosen and is not so by itself.
const FIRST = {};  // the state before anything is chosen
const NUMBERS = new Set(["s", "head", "picked", "rank", "length", "trained", "at", "deep", "taken", "edited", "decided", "watched",
  "push", "along", "size"]);
let section = "";

function remember() {
  const view = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== FIRST[name] && (name !== "picked" || value !== remarkable())) view.set(name, value ?? "");
  }
  const words = view.toString();
  history.replaceState(null, "", words || section ? `#${section}${words && `?${words}`}` : " ");
}

// What a link says, as far as this page knows it: a link may be of another page, or broken.
const ONE_OF = { quantity: () => QUANTITIES.map(([q]) => q), sort: () => SORTS.map(([q]) => q),
  theme: () => THEMES, s: () => D.settings.map((_, k) => k), every: () => ["yes"] };
function said(words) {
  const found = {};
  for (const [name, text] of new URLSearchParams(words)) {
    if (!Object.hasOwn(FIRST, name)) continue;
    const value = text === "" && name !== "tables" ? null : NUMBERS.has(name) ? Number(text) : text;
    const known = ONE_OF[name]?.() ?? [value];
    if (!Number.isNaN(value) && (value === FIRST[name] || known.includes(value))) found[name] = value;
  }
  return found;
}

function restored() {
  const [place, ...words] = location.hash.slice(1).split("?");
  section = document.querySelector("main")?.querySelector(`:scope > #${CSS.escape(place || "-")}`) ? place : "";
  if (!words.length && document.documentElement.dataset.drawn !== undefined) return remember();  // a jump
  choose({ ...FIRST, ...said(words.join("?")) });
  themed();
  if (section && words.length) $(section).scrollIntoView();
}
