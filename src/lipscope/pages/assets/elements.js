// What every page is made of: elements, numbers as they are said, controls, the theme.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const number = (v, digits = 4) => {
  if (v === null || v === undefined) return "–";
  if (v !== 0 && (Math.abs(v) < 1e-4 || Math.abs(v) >= 1e6)) return v.toExponential(digits - 1);
  const places = v === 0 ? 0 : digits - 1 - Math.floor(Math.log10(Math.abs(v)));
  return v.toFixed(Math.min(Math.max(places, 0), 12));
};
// A lower end is rounded downwards and an upper end upwards, so that what is shown still holds.
const [downward, upward] = [-1, 1].map((way) => (v, digits = 4) => {
  if (!v) return number(v, digits);
  const near = Number(v.toExponential(digits - 1));
  if (way * (near - v) >= 0) return number(near, digits);
  const step = Number(`1e${Number(v.toExponential().split("e")[1]) - digits + 1}`);
  return number(Number((near + way * step).toExponential(digits - 1)), digits);
});
const certifiedRadius = (one) => (one.radius === null ? "any" : number(one.radius));
const percent = (v) => (v === null || v === undefined ? "–"
  : `${(100 * v).toFixed(Math.abs(v) >= 0.0995 ? 0 : Math.abs(v) >= 0.01 ? 1 : 2)} %`);
const ends = (p) => (p.upper === null && p.sigma !== null ? `≥ ${downward(p.sigma)}` : `[${downward(p.sigma)}, ${upward(p.upper)}]`);
const enclosed = (p) => (p.upper === null ? ends(p) : `${number(p.sigma)} in ${ends(p)}`);
// Elements with text as text: nothing that a row says can become markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}
// What is in it is made anew; the keyboard goes back to the control in use.
function fill(id, ...children) {
  const box = $(id);
  const used = box.contains(document.activeElement) ? document.activeElement.closest("label")?.firstChild.textContent : undefined;
  box.replaceChildren(...children.filter((c) => c !== null));
  if (used) [...box.querySelectorAll("label")].find((l) => l.firstChild.textContent === used)?.querySelector("select")?.focus();
}

function select(label, value, options, change) {
  const list = make("select", { "aria-label": label, onchange: (e) => change(options[e.target.selectedIndex][0]) });
  for (const [key, text] of options) {
    const option = make("option", {}, text);
    option.selected = key === value;
    list.append(option);
  }
  list.disabled = options.length < 2;
  return make("label", {}, label, list);
}

const distinct = (values) => [...new Set(values)];
const lengthsOf = (rows) => distinct(rows.map((r) => r.n)).sort((a, b) => a - b);

const THEMES = ["automatic", "light", "dark"];
function nextTheme() {
  state.theme = THEMES[(THEMES.indexOf(state.theme ?? "automatic") + 1) % 3];
  remember();
  themed();
}
function themed() {
  document.documentElement.dataset.theme = state.theme ?? "automatic";
  $("theme").textContent = `Theme: ${state.theme ?? "automatic"}`;
}
