// Figures as PNG files, from one menu, and tables as CSV files, as they are on the page.

const FIGURES = [["grid", "Heads"], ["heat", "Step by position"], ["path", "Path of the strongest key"], ["pattern", "Attention"], ["change", "A beside B"]];
const TABLES = [["change-table", "steps"], ["places", "positions"], ["lens-table", "layers"]];

function saveFile(blob, name) {
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const nameOfFile = (what, kind) => `sinklens-${what}-${[lab.A, lab.B].filter(Boolean).join("-")}.${kind}`;

// A figure on the color of its card; a transparent one cannot be read on a dark page.
function saveFigure(canvas, title) {
  const copy = make("canvas"), brush = copy.getContext("2d");
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  brush.fillStyle = inkOf("card");
  brush.fillRect(0, 0, copy.width, copy.height);
  brush.drawImage(canvas, 0, 0);
  copy.toBlob((blob) => saveFile(blob, nameOfFile(title.toLowerCase().replaceAll(" ", "-"), "png")));
}

// A text in CSV; one that a spreadsheet would run as a formula is quoted as text.
const csvCell = (text) => { const safe = /^'*\s*[=+\-@＝＋－＠]/.test(text) && !/^[-+]?\d[\d.e+-]*$/.test(text) ? `'${text}` : text; return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
const csvOf = (rows) => rows.map((row) => row.map((cell) => csvCell(String(cell ?? ""))).join(",")).join("\n") + "\n";
const saveRows = (rows, what) => saveFile(new Blob([csvOf(rows)], { type: "text/csv" }), nameOfFile(what, "csv"));

function trialRows() {
  const { heads = [] } = trialNow() || {}, names = ["layer", "head", "kl", "same", "changed", "number", "right", "text"];
  return [names, ...heads.map((entry) => names.map((name) => entry[name]))];
}

function saveButton(what, rows) {
  const text = `Save ${what} as CSV`, node = button(text, text, () => saveRows(rows(), what));
  node.classList.add("save");
  return node;
}

function listenExport() {
  byId("save-picture").addEventListener("click", (event) => {
    const there = FIGURES.filter(([id]) => byId(id).checkVisibility());
    openMenu(...placeOf(event, byId("save-picture")), "As a PNG file", there.map(([id, title]) => [title, () => saveFigure(byId(id), title)]));
  });
  for (const [id, what] of TABLES) {
    const rows = () => [...byId(id).rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    byId(id).parentElement.before(saveButton(what, rows));
  }
  byId("trial").append(saveButton("heads", trialRows));
}
