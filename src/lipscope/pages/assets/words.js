// Text with its shares, directions in words, tables.
const cell = (said, kind) => (kind === "row" ? make("th", { scope: kind }, said)
  : make("td", kind ? { class: kind } : {}, ...[said].flat()));
// A table, if there are rows: of each column its heading, what it says of a row, and the kind of its cells.
const list = (id, rows, columns, front = () => false) => fill(id, !rows.length ? null
  : make("thead", {}, make("tr", {}, ...columns.map(([name, , kind]) => make("th",
    { scope: "col", class: kind === "number" ? kind : null }, name)))),
make("tbody", {}, ...rows.map((r) => make("tr", { class: front(r) ? "front" : null },
  ...columns.map(([, of, kind]) => cell(of(r), kind))))));

const toLargest = (shares) => `0 to ${percent(Math.max(...shares) / D.scale)}`;

// The shade follows the cube root: a thousandth of the top can still be told from none.
function spans(words, shares, norms) {
  const top = Math.max(...shares, 1);
  return words.map((word, k) => {
    const share = (shares[k] ?? 0) / D.scale;
    const span = make("span", { title: `token ${k}: ${percent(share)}, norm ${number(norms[k])}`,
      class: shares[k] === top ? "top" : null }, word);
    span.style.setProperty("--p", (78 * Math.cbrt((shares[k] ?? 0) / top)).toFixed(1));
    return span;
  });
}

const SPACES = { vocabulary: "tokens in its place", "read-out": "the model's logits",
  window: "the other tokens here" };
const VERBS = [["right", "Moves"], ["left", "Answers"]];

function wordsOf(t) {
  const chips = (sign, words) => make("p", { class: "chips" }, make("b", {}, sign), ...words.length
    ? words.map(([word, cosine]) => {
      const chip = make("span", { title: `cosine ${number(cosine, 2)}` }, word);
      chip.style.setProperty("--p", (70 * cosine).toFixed(1));
      return chip;
    }) : ["–"]);
  const nothing = make("p", { class: "quiet" }, "reads as nothing");
  const numbers = t.reads === null ? "" : `nearest ${number(t.cosine, 2)} (chance ${number(t.chance_cosine, 2)}), `
    + `spanned ${percent(t.spanned)} (chance ${percent(t.chance_spanned)}); read in: ${SPACES[t.space]}`;
  return make("div", { class: "reading" }, make("p", {}, make("q", {}, t.text),
    ` (${t.index}), ${percent(t.share)} of the vector`),
  ...t.reads ? [chips("+", t.plus), chips("−", t.minus)] : [nothing], make("p", { class: "note" }, numbers));
}

function drawHeadParts(heads) {
  if (!heads.length) return fill("words-heads");
  const most = Math.max(...heads.map(([, share]) => Math.abs(share)));
  return fill("words-heads", make("figcaption", {}, make("b", {}, "Parts of the heads in the answer"),
    make("span", {}, "⟨u, Jₕ v⟩ / sigma: together 1; a negative one works against it")),
  make("div", { class: "bars" }, ...heads.toSorted((a, b) => a[0] - b[0]).flatMap(([head, share]) => {
    const bar = make("i", { class: share < 0 ? "against" : null });
    bar.style.width = `${(100 * Math.abs(share) / most).toFixed(1)}%`;
    return [make("span", {}, head), make("div", {}, bar), make("span", {}, percent(share))];
  })));
}
