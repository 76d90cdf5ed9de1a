// An anywidget: shows a report in a frame of the notebook; what is clicked there becomes the model's selection.

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "Run";
  frame.setAttribute("sandbox", "allow-scripts");
  frame.style.cssText = `width: 100%; border: 0; height: ${model.get("height")}px`;
  frame.srcdoc = model.get("document");
  const hear = ({ data, source }) => {
    if (source !== frame.contentWindow || !data || data.sinklens !== "selection") return;
    model.set("selection", data.selection);
    model.save_changes();
  };
  addEventListener("message", hear);
  el.append(frame);
  return () => removeEventListener("message", hear);
}

export default { render };
