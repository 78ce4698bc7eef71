"""The report's style sheet and its script. The page is whole without the script, which sorts, filters and unfolds."""

from __future__ import annotations

from bridge.parity.report_page.markup import shades

_LIGHT = (
    "--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#59636e;--rule:#d4dae1;--link:#0a58ca;"
    "--band:#c9d3de;--wide:#e6ebf0;--line:#9aa7b4;--begin:#b3121d;--beyond:#b45309;--bar:#8fa3b8"
)
_DARK = (
    "--paper:#14171b;--card:#1b1e23;--ink:#e6e9ed;--soft:#a3adb8;--rule:#3a424c;--link:#7ab3ff;"
    "--band:#3b4754;--wide:#262e37;--line:#66727f;--begin:#ff7b72;--beyond:#e3a04f;--bar:#6d8299"
)

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}{shades('light')}"
    f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}{shades('dark')}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1560px;margin:0 auto;padding:12px 16px 60px}
h1{font-size:1.5rem;margin:.4em 0}h2{font-size:1.2rem;margin:1.8em 0 .5em}
h1,h3,p,li,td.w,summary{overflow-wrap:anywhere}
a{color:var(--link)}nav a{margin-right:1em;white-space:nowrap}
.verdict{font-size:1.15rem;border-left:6px solid var(--begin);background:var(--card);padding:.6em .9em;margin:.5em 0}
.verdict.same{border-color:var(--bar)}
.soft,figcaption,.facts i{color:var(--soft)}figcaption{font-weight:600}
.first-card{border:2px solid var(--begin);border-radius:8px;padding:.3em .9em;background:var(--card)}
.facts{display:flex;flex-wrap:wrap;gap:.1em 1.1em;margin:.35em 0;font-size:.9rem}
.facts{border-top:1px dotted var(--rule);padding-top:.3em}
.facts i{font-style:normal;font-size:.82em}.facts span{min-width:0}
.v{font-weight:600;white-space:nowrap}.v.introduced{color:var(--begin)}.v.differs,.v.inherited{color:var(--beyond)}
.chip{display:inline-block;border:1px solid var(--rule);border-radius:1em;padding:0 .6em;font-size:.82rem}
.chip.first{border:2px solid var(--begin);font-weight:700;background:var(--paper)}
.inside,.partner{color:var(--soft);font-size:.85rem}
summary{cursor:pointer}button{font:inherit;font-size:.9rem}
.tree summary{padding:.15em .5em;border-radius:4px;border:1px solid var(--rule);margin:2px 0}
.tree summary .inside,.tree summary .partner,.tree summary em{color:inherit;opacity:.85}
.tree summary em{font-size:.85rem}
.tree .begin>summary{border:2px solid var(--begin)}
.node{margin-left:10px;padding-left:10px;border-left:1px solid var(--rule)}
.legend span{display:inline-block;border:1px solid var(--rule);padding:0 .7em;font-size:.85rem}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{border:1px solid var(--rule);padding:.15em .5em;text-align:left;vertical-align:top}
th{background:var(--card);white-space:nowrap}
td{white-space:nowrap}td.w{white-space:normal;min-width:23em;max-width:40em}td.r{text-align:right}
th[data-k]{cursor:pointer}th[aria-sort=ascending]::after{content:" ▲"}th[aria-sort=descending]::after{content:" ▼"}
tr.first td{outline:2px solid var(--begin)}
figure{margin:1em 0}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg.depth{width:100%;min-width:1080px;max-width:1500px;display:block}
svg.histogram{width:100%;max-width:520px;display:block}
.histograms{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:0 1.5em}
text.y,text.x{text-anchor:end}text.n{text-anchor:middle}
.band{fill:var(--band)}.band.wide{fill:var(--wide)}
.grid{stroke:var(--rule);stroke-width:.6}.axis{stroke:var(--soft)}
.limit{stroke:var(--begin);stroke-dasharray:4 3}
polyline.line{fill:none;stroke:var(--line);stroke-width:1}
circle.same{fill:var(--bar)}circle.inherited{fill:var(--paper);stroke:var(--beyond);stroke-width:1.6}
path.differs{fill:var(--beyond)}path.introduced{fill:var(--begin)}
line.begin{stroke:var(--begin);stroke-width:1;stroke-dasharray:2 2}
rect.same{fill:var(--bar)}rect.beyond{fill:var(--beyond)}
ol.key{columns:26em auto;margin:.2em 0}
.only-beyond tr.is-same,.only-beyond .tree details.quiet{display:none}
.tools{display:none}.js .tools{display:block}
@media(max-width:600px){main{padding:8px 10px 40px}.node{margin-left:2px;padding-left:5px}td.w{min-width:13em}}
@media print{.tools,nav{display:none}}
"""
)

SCRIPT = """
'use strict';
document.documentElement.classList.add('js');
const value = (row, column) => row.cells[column].textContent.trim();
const numeric = text => text === 'inf' ? Infinity : text === '' || text === 'nan' ? NaN : Number(text);
for (const head of document.querySelectorAll('table.rows th')) {
  head.dataset.k = '';
  head.tabIndex = 0;
  const sort = () => {
    const table = head.closest('table'), column = head.cellIndex, body = table.tBodies[0];
    const down = head.getAttribute('aria-sort') !== 'descending';
    const isNumber = head.classList.contains('number');
    const rows = Array.from(body.rows, row => [row, value(row, column)]);
    // NaN last, both ways.
    rows.sort(([, a], [, b]) => {
      if (!isNumber) return down ? b.localeCompare(a) : a.localeCompare(b);
      const x = numeric(a), y = numeric(b);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return x === y ? 0 : (down ? x < y : x > y) ? 1 : -1;
    });
    for (const other of table.querySelectorAll('th')) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    body.append(...rows.map(([row]) => row));
  };
  head.addEventListener('click', sort);
  head.addEventListener('keydown', event => { if (event.key === 'Enter') sort(); });
}
const only = document.getElementById('only');
only.addEventListener('change', () => document.body.classList.toggle('only-beyond', only.checked));
for (const [id, open] of [['unfold', true], ['fold', false]]) {
  document.getElementById(id).addEventListener('click', () => {
    for (const one of document.querySelectorAll('.tree details')) one.open = open;
  });
}
const reveal = () => {
  const target = document.getElementById(location.hash.slice(1));
  for (let one = target; one; one = one.parentElement) if (one.tagName === 'DETAILS') one.open = true;
  if (target) target.scrollIntoView();
};
addEventListener('hashchange', reveal);
if (location.hash) reveal();
"""
