// The filter of the table of behaviour.md, in the page itself: docs/site.py puts it there. Without it the table is whole.
function shown(text, row, words, section) {
  const found = words.toLowerCase().split(/\s+/).every((word) => text.toLowerCase().includes(word));
  return found && (section === "" || row.startsWith(section));
}

function filtered(place) {
  const table = [...document.querySelectorAll("table")].find((each) => each.rows.length > 100);
  const rows = [...table.tBodies[0].rows];
  table.dataset.cases = "";  // for site.css
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "words of a case" });
  const select = document.createElement("select");
  const count = document.createElement("output");
  for (const [letter, title] of Object.entries({ "": "all sections", ...JSON.parse(place.dataset.sections) }))
    select.add(new Option(title, letter));
  input.value = new URLSearchParams(location.search).get("q") || "";
  input.setAttribute("aria-label", "words of a case");
  select.setAttribute("aria-label", "section");
  const update = () => {
    for (const row of rows)
      row.hidden = !shown(row.textContent, row.cells[0].textContent.trim(), input.value.trim(), select.value);
    count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", update);
  select.addEventListener("change", update);
  place.append(input, " ", select, " ", count);
  update();
}

if (typeof document !== "undefined") filtered(document.getElementById("behaviour-filter"));
