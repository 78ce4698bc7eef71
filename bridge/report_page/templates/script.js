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
    for (const details of document.querySelectorAll('.tree details')) details.open = open;
  });
}
const reveal = () => {
  const target = document.getElementById(location.hash.slice(1));
  for (let outer = target; outer; outer = outer.parentElement) if (outer.tagName === 'DETAILS') outer.open = true;
  if (target) target.scrollIntoView();
};
addEventListener('hashchange', reveal);
if (location.hash) reveal();
