// Shows two scripts next to each other; LINES and PAIRS come from reader.py.
const $ = (id) => document.getElementById(id);
const left = $("reader-left"), right = $("reader-right"), fold = $("reader-fold");
const names = Object.keys(LINES);
for (const select of [left, right])
  for (const name of names) select.add(new Option(`${name}.py`, name));

function pairsOf(x, y) {
  if (x === y) return LINES[x].map((_, i) => [i, i]);
  const pairs = PAIRS[`${x},${y}`];
  return pairs || PAIRS[`${y},${x}`].map(([i, j]) => [j, i]);
}

function cell(kind, number, html) {
  const empty = number === null;
  return `<span class="reader-number">${empty ? "" : number + 1}</span>` +
    `<code class="${empty ? "reader-empty" : kind}">${empty ? "" : html || "\n"}</code>`;
}

// Rows, with runs of equal lines folded but for three on either side
function rows(x, y) {
  const all = pairsOf(x, y).map(([i, j]) => {
    const l = i === null ? null : LINES[x][i], r = j === null ? null : LINES[y][j];
    return { i, j, l, r, equal: l === r };
  });
  const near = all.map((_, n) => all.slice(Math.max(n - 3, 0), n + 4).some((row) => !row.equal));
  return all.map((row, n) => ({ ...row, folded: fold.checked && !near[n] }));
}

let open = new Set();  // folds that the reader has opened
function show() {
  const parts = [];
  let run = [], differences = 0, wasEqual = true;
  const flush = () => {
    if (!run.length) return;
    const first = run[0].n;
    if (open.has(first)) parts.push(...run.map(line));
    else parts.push(`<button type="button" class="reader-fold" data-fold="${first}">` +
      `${run.length} equal lines</button>`);
    run = [];
  };
  const line = (row) => {
    const start = !row.equal && wasEqual ? ' data-difference tabindex="-1"' : "";
    if (start) differences++;
    wasEqual = row.equal;
    const kind = row.equal ? "reader-equal" : "reader-differs";
    return `<div class="reader-row ${kind}"${start}>` +
      cell("reader-left", row.i, row.l) + cell("reader-right", row.j, row.r) + "</div>";
  };
  rows(left.value, right.value).forEach((row, n) => {
    row.n = n;
    if (row.folded) { run.push(row); wasEqual = true; }
    else { flush(); parts.push(line(row)); }
  });
  flush();
  $("reader").innerHTML = parts.join("");
  $("reader-count").textContent = differences === 1 ? "1 difference" : `${differences} differences`;
}

function choose() {
  open = new Set();
  history.replaceState(null, "", `#${left.value},${right.value}`);
  show();
}

function fromLink() {
  const [x, y] = location.hash.slice(1).split(",");
  left.value = names.includes(x) ? x : "ddpg_torch";
  right.value = names.includes(y) ? y : "td3_torch";
  choose();
}

function go(step) {
  const starts = [...document.querySelectorAll("[data-difference]")];
  const line = $("reader-choice").getBoundingClientRect().bottom + 8;
  const tops = starts.map((row) => row.getBoundingClientRect().top - line);
  const at = step > 0 ? tops.findIndex((top) => top > 1) : tops.findLastIndex((top) => top < -1);
  if (at < 0) return;
  window.scrollBy({ top: tops[at] });
  starts[at].focus({ preventScroll: true });
}

function swap() {
  [left.value, right.value] = [right.value, left.value];
  choose();
}

left.onchange = right.onchange = choose;
fold.onchange = show;
$("reader-swap").onclick = swap;
$("reader-next").onclick = () => go(1);
$("reader-previous").onclick = () => go(-1);
$("reader").onclick = (event) => {
  const n = event.target.dataset.fold;
  if (n === undefined) return;
  open.add(Number(n));
  show();
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(event.target.tagName)) return;
  const keys = { n: () => go(1), p: () => go(-1), s: swap, f: () => fold.click() };
  if (keys[event.key]) keys[event.key]();
});
window.addEventListener("hashchange", fromLink);
fromLink();
