// Shows two scripts next to each other. LINES, the lines of all scripts, comes from reader.py.
const $ = (id) => document.getElementById(id);
const left = $("reader-left"), right = $("reader-right"), fold = $("reader-fold");
const names = Object.keys(LINES);
for (const select of [left, right])
  for (const name of names) select.add(new Option(`${name}.py`, name));

// A line: its text, what it begins, its words as a set, and its smallest pieces, with their colours
const SCRIPTS = Object.fromEntries(names.map((name) => [name, LINES[name].map((pieces, n) => {
  const text = pieces.map(([piece]) => piece).join("");
  const begins = text.match(/^\s*(?:class|def) \w+/)?.[0];
  const split = ([piece, color]) =>
    piece.match(/\w+|\s+|[^\w\s]/g).map((piece) => ({ piece, color }));
  return { n, text, begins, words: new Set(text.match(/\w+/g)), pieces: pieces.flatMap(split) };
})]));

// Pairs of a and b, in order, that have the largest sum of scores; what has no partner is alone
function align(a, b, score) {
  const best = Array.from({ length: a.length + 1 }, () => new Float64Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--) {
      const pair = score(a[i], b[j]);
      best[i][j] = Math.max(best[i + 1][j], best[i][j + 1], pair && pair + best[i + 1][j + 1]);
    }
  const pairs = [];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    const pair = i < a.length && j < b.length && score(a[i], b[j]);
    if (pair && best[i][j] === pair + best[i + 1][j + 1]) pairs.push([a[i++], b[j++]]);
    else if (i < a.length && best[i][j] === best[i + 1][j]) pairs.push([a[i++], null]);
    else pairs.push([null, b[j++]]);
  }
  return pairs;
}

// Lines may stand next to each other if they share half of their words, the more the better, and
// best of all if they begin the same function
function likeness(x, y) {
  if (x.text === y.text) return x.words.size + 1;
  let shared = x.begins && x.begins === y.begins ? 10 : 0;
  for (const word of x.words) shared += y.words.has(word);
  return 4 * shared >= x.words.size + y.words.size ? shared : 0;
}

function line({ n, text, pieces }) {
  const [, part, step] =
    text.match(/^(?:class|def) (\w+)|^    # ([A-Z][^:,]{2,23})(?=[:,]|$)/) || [];
  const section = part || step ? ` data-section="${part || step}"` : "";
  const words = pieces.map(({ piece, color, differs }) =>
    `<span class="${color}${differs ? " differs" : ""}">` +
    `${piece.replace("&", "&amp;").replace("<", "&lt;")}</span>`);
  const indent = text.search(/\S|$/);
  return `<code data-n="${n + 1}" style="--indent: ${indent}"${section}>${words.join("")}\n</code>`;
}

const row = (kind, ...sides) => `<div class="reader-row ${kind}">` + sides.map((lines, n) =>
  `<div class="reader-side ${["left", "right"][n]}">${lines.map(line).join("")}</div>`
).join("") + "</div>";

const equal = ([x, y]) => Boolean(x && y && x.text === y.text);
const equalRow = ([x, y]) => row("equal", [x], [y]);

// Two lines of which only some words differ
function changedRow([x, y]) {
  const pairs = align(x.pieces, y.pieces, (p, q) => Number(p.piece === q.piece));
  const marked = (n) => pairs.filter((pair) => pair[n])
    .map((pair) => ({ ...pair[n], differs: !pair[1 - n] }));
  return row("changed", [{ ...x, pieces: marked(0) }], [{ ...y, pieces: marked(1) }]);
}

// A run of equal lines folds, but for three lines next to each difference
function equalRows(run, isFirst, isLast) {
  const start = isFirst ? 0 : 3, end = run.length - (isLast ? 0 : 3), rows = run.map(equalRow);
  if (end - start < 4) return rows.join("");
  rows.splice(end, 0, "</details>");
  rows.splice(start, 0, `<details${fold.checked ? "" : " open"}>` +
    `<summary>${end - start} equal lines</summary>`);
  return rows.join("");
}

// Lines without a partner stand in one row until there is a pair
function difference(run) {
  let html = "", alone = [[], []];
  for (const [x, y] of [...run, []]) {
    if (x && !y) alone[0].push(x);
    else if (y && !x) alone[1].push(y);
    else {
      if (alone.flat().length) html += row("alone", ...alone);
      if (x && y) html += changedRow([x, y]);
      alone = [[], []];
    }
  }
  return `<div class="reader-difference" tabindex="-1">${html}</div>`;
}

let count;  // what differs, in words
function show() {
  const pairs = align(SCRIPTS[left.value], SCRIPTS[right.value], likeness), runs = [];
  for (const pair of pairs) {
    if (!runs.length || equal(runs.at(-1)[0]) !== equal(pair)) runs.push([]);
    runs.at(-1).push(pair);
  }
  $("reader").innerHTML = runs.map((run, n) =>
    equal(run[0]) ? equalRows(run, n === 0, n === runs.length - 1) : difference(run)).join("");
  const differ = pairs.filter((pair) => !equal(pair)), all = differences().length;
  const [removed, added] = [0, 1].map((side) => differ.filter((pair) => pair[side]).length);
  const word = (text) => `<span class="reader-word"> ${text}</span>`;  // a phone has no room for it
  count = `${all}${word(all === 1 ? "difference" : "differences")}, −${removed} +${added}${word("lines")}`;
  $("reader-count").innerHTML = count;
  $("reader-section").replaceChildren(new Option("go to …", ""));
  for (const { dataset } of $("reader").querySelectorAll(".right [data-section]"))
    $("reader-section").add(new Option(dataset.section));
  link();
}

function link() {
  history.replaceState(null, "", `#${left.value},${right.value}${fold.checked ? ",fold" : ""}`);
  document.title = `${left.value}.py | ${right.value}.py`;
}

function fromLink() {
  const [x, y, folded] = location.hash.slice(1).split(",");
  left.value = names.includes(x) ? x : "ddpg_torch";
  right.value = names.includes(y) ? y : "td3_torch";
  fold.checked = folded === "fold";
  show();
}

const differences = () => [...$("reader").querySelectorAll(".reader-difference")];
// How far an element is from where it is read best, three lines below the bar
const distance = (element) =>
  element.getBoundingClientRect().top - $("reader-bar").offsetHeight - 50;
const scrollDown = (top) => window.scrollBy({ top, behavior: "instant" });

// From the difference that has the focus, or if it is out of sight, from what is on the screen
function go(step) {
  const all = differences(), tops = all.map(distance), from = all.indexOf(document.activeElement);
  let at = from + step;
  if (from < 0 || tops[from] < -1 || tops[from] > innerHeight)
    at = step > 0 ? tops.findIndex((top) => top > 1) : tops.findLastIndex((top) => top < -1);
  if (!all[at]) return;
  scrollDown(tops[at]);
  all[at].focus({ preventScroll: true });
  $("reader-count").innerHTML = `${at + 1} of ${count}`;
}

// What is being read stays where it is on the screen
function refold() {
  const kept = differences().find((part) => distance(part) > -1), top = kept && distance(kept);
  for (const run of $("reader").querySelectorAll("details")) run.open = !fold.checked;
  if (kept) scrollDown(distance(kept) - top);
  link();
}

function swap() {
  [left.value, right.value] = [right.value, left.value];
  show();
}

// A map of the differences, next to the scripts
new ResizeObserver(() => {
  const percent = (length) => `${100 * length / $("reader").offsetHeight}%`;
  $("reader-map").innerHTML = differences().map((part) =>
    `<i style="top: ${percent(part.offsetTop)}; height: ${percent(part.offsetHeight)}"></i>`
  ).join("");
}).observe($("reader"));
$("reader-map").onclick = ({ clientY }) => {
  const { top, height } = $("reader-map").getBoundingClientRect();
  scrollDown(distance($("reader")) + (clientY - top) / height * $("reader").offsetHeight);
};

left.onchange = right.onchange = show;
fold.onchange = refold;
$("reader-swap").onclick = swap;
$("reader-next").onclick = () => go(1);
$("reader-previous").onclick = () => go(-1);
$("reader-section").onchange = ({ target }) => {
  const line = $("reader").querySelector(`.right [data-section="${target.value}"]`);
  if (line.closest("details")) line.closest("details").open = true;
  scrollDown(distance(line));
  target.value = "";
};
// Text is selected on one side only
$("reader").onmousedown = ({ target }) => {
  $("reader").dataset.select = target.closest(".left, .right")?.classList[1] || "";
};
document.onkeydown = (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("select, input:not([type=checkbox])")) return;
  const keys = { n: () => go(1), p: () => go(-1), s: swap, f: () => fold.click() };
  keys[event.key]?.();
};
window.onhashchange = fromLink;
fromLink();
