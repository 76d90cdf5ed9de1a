// Figures as PNG files and tables as CSV files, as they are on the page.

const FIGURES = [["grid", "heads"], ["heat", "steps-by-positions"], ["path", "path"], ["pattern", "attention"], ["change", "a-beside-b"]];
const TABLES = [["change-table", "change-per-step"], ["places", "positions-that-differ"], ["lens-table", "layers"]];

function saveFile(blob, name) {
  const link = make("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

const nameOfFile = (what, kind) => `sinklens-${what}-${[lab.A, lab.B].filter(Boolean).join("-")}.${kind}`;

// A figure on the color of its card; a transparent one cannot be read on a dark page.
function saveFigure(canvas, what) {
  const copy = make("canvas"), brush = copy.getContext("2d");
  Object.assign(copy, { width: canvas.width, height: canvas.height });
  brush.fillStyle = inkOf("card");
  brush.fillRect(0, 0, copy.width, copy.height);
  brush.drawImage(canvas, 0, 0);
  copy.toBlob((blob) => saveFile(blob, nameOfFile(what, "png")));
}

// A text in CSV; one that a spreadsheet would run as a formula is quoted as text.
const csvCell = (text) => { const safe = /^'*\s*[=+\-@＝＋－＠]/.test(text) && !/^[-+]?\d[\d.e+-]*$/.test(text) ? `'${text}` : text; return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
const csvOf = (rows) => rows.map((row) => row.map((cell) => csvCell(String(cell ?? ""))).join(",")).join("\n") + "\n";
const saveRows = (rows, what) => saveFile(new Blob([csvOf(rows)], { type: "text/csv" }), nameOfFile(what, "csv"));

function trialRows() {
  const { heads = [] } = trialNow() || {}, names = ["layer", "head", "kl", "same", "changed", "number", "right", "text"];
  return [names, ...heads.map((entry) => names.map((name) => entry[name]))];
}

function listenExport() {
  for (const [id, what] of FIGURES) {
    const node = button("Save PNG", `Save this figure as a PNG file: ${what}`, () => saveFigure(byId(id), what));
    node.classList.add("save");
    byId(id).parentElement.after(node);
  }
  for (const [id, what] of TABLES) {
    const node = button("Save CSV", `Save this table as a CSV file: ${what}`, () => saveRows([...byId(id).rows].map((row) => [...row.cells].map((cell) => cell.textContent)), what));
    node.classList.add("save");
    byId(id).parentElement.before(node);
  }
  const node = button("Save CSV", "Save the effects of all heads tried as a CSV file", () => saveRows(trialRows(), "heads-tried"));
  node.classList.add("save");
  byId("trial").append(node);
}
