// Sigma through depth: maps of every layer, the model's map, and the product of the blocks.
const MAP_COLOURS = { attention: "--blue", normed: "--purple", heads: "--quiet", residual: "--green", block: "--orange" };
const { depths } = D;
const deepRows = depths.flatMap((d) => [...d.lines, ...d.whole, ...d.products]);
$("depth").hidden = !depths.some((d) => distinct(d.lines.map((x) => x.layer)).length > 1);

const depthsHere = () => depths.filter((d) => ["model", "metric", "move", "read", "text"]
  .every((name) => d[name] === setting()[name]));
// The length and folder that are chosen, or the length with the most maps, the longest of these.
function depth() {
  const all = depthsHere();
  const mine = all.filter((d) => d.source === null || d.source === state.source);
  const some = (mine.length ? mine : all).sort((a, b) => distinct(b.lines.map((x) => x.map)).length
    + b.whole.length + b.products.length - distinct(a.lines.map((x) => x.map)).length - a.whole.length - a.products.length || b.n - a.n);
  return some.find((d) => d.n === state.deep) ?? some[0];
}
const deepName = (r) => (r.map === "model" ? "the model's map" : r.map === "product"
  ? `product of blocks 0 to ${r.layer}` : r.map === "stack" ? `blocks 0 to ${r.layer} together` : `layer ${r.layer}, map ${r.map}`);
registerMarks("z", deepRows, (r) => (r.layer === undefined ? null : choose({ layer: String(r.layer) })),
  (r) => [make("b", {}, `${deepName(r)}, ${r.n} tokens`), line(meanIn(r)), line(meanOf(r))]);

CHARTS.layers = { spec: "depth", say: () => "Sigma of every map by layer",
  data: () => ({ lines: depth()?.lines ?? [], whole: depth()?.whole ?? [] }), signals: () => ({ axes: depth()?.axes.layers }),
  empty: "No layers in this selection." };
CHARTS.products = { spec: "products", say: () => "Product of the blocks by layer and the model's map",
  data: () => ({ products: depth()?.products ?? [], whole: depth()?.whole ?? [] }), signals: () => ({ axes: depth()?.axes.products }),
  empty: "Nothing of several layers. The product takes the map block at every layer, of one input and with all tokens moved and read "
    + "(lipscope measure … --map block); set beside it are the blocks together and the model (--map stack, --map model)." };
COLUMNS.map = column("map", deepName, deepName, "whole");
TABLES.layers = ["lines", "layer map sigma between count"];
TABLES.products = ["products", "layer map sigma between count"];

DRAWERS.push(() => {
  const d = depth();
  const lengths = lengthsOf(depthsHere());
  fill("depth-controls", lengths.length > 1 ? chooseLength("Length through depth", d.n, lengths, "deep") : null);
  for (const about of document.querySelectorAll(".about-depth")) {
    about.textContent = d ? `${d.model}, ${d.n} tokens` : "";
  }
  const maps = distinct((d?.lines ?? []).map((x) => x.map));
  fill("maps", ...maps.map((map) => {
    const dot = make("i", { class: "dot" });
    dot.style.background = `var(${MAP_COLOURS[map]})`;
    return make("span", {}, dot, map);
  }), d?.whole.length ? "dashed: the model's map" : null);
  $("depth-note").textContent = d ? `Points: geometric means over windows; bars: 95 % for the sampling of text, where windows share none. ${d.said}` : "";
});
