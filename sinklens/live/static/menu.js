// A menu beside what was pointed at; an item without an action is a heading. Arrow keys move in it, Escape closes it and returns the focus.

const menuFrom = { node: null };

function openMenu(x, y, title, items) {
  const menu = byId("menu");
  menuFrom.node = document.activeElement;
  write(menu, make("p", title), ...items.map(([text, act]) => {
    if (!act) return make("p", text);
    const item = make("button", text);
    item.type = "button";
    item.setAttribute("role", "menuitem");
    item.addEventListener("click", () => { closeMenu(); act(); });
    return item;
  }));
  menu.setAttribute("aria-label", title);
  menu.hidden = false;
  const box = menu.getBoundingClientRect();
  menu.style.left = `${clamp(x, 8, Math.max(8, innerWidth - box.width - 8))}px`;
  menu.style.top = `${clamp(y, 8, Math.max(8, innerHeight - box.height - 8))}px`;
  menu.querySelector("button")?.focus({ preventScroll: true });
}

function closeMenu() {
  if (byId("menu").hidden) return;
  byId("menu").hidden = true;
  if (menuFrom.node && menuFrom.node.isConnected) menuFrom.node.focus({ preventScroll: true });
}

function menuKey(event) {
  const items = [...byId("menu").querySelectorAll("button")], at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to !== undefined) items[(to + items.length) % items.length].focus();
  else if (event.key === "Escape" || event.key === "Tab") closeMenu();
  else if (event.key !== "Enter" && event.key !== " ") return;
  if (event.key !== "Enter" && event.key !== " ") event.preventDefault();
  event.stopPropagation();
}

function listenMenu() {
  byId("menu").addEventListener("keydown", menuKey);
  // Not at "scroll": a figure that takes the focus is scrolled into view after the key that opens its menu.
  const outside = (event) => { if (!event.target.closest("#menu")) closeMenu(); };
  for (const kind of ["pointerdown", "wheel", "touchmove"]) document.addEventListener(kind, outside, { capture: true, passive: true });
}

// A dialog does not block the page: what it is about stays in sight. Escape closes it, and the focus returns.
function openDialog(id) {
  const dialog = byId(id), from = document.activeElement;
  dialog.onkeydown = (event) => { if (event.key === "Escape") dialog.close(); };
  dialog.onclose = () => { if (from.isConnected) from.focus({ preventScroll: true }); };
  dialog.show();
}

// Where a menu opens for an event, or beside a node if the event came from the keyboard.
function placeOf(event, node) {
  if (event && event.clientX) return [event.clientX + 8, event.clientY + 8];
  const box = node.getBoundingClientRect();
  return [box.left + Math.min(40, box.width / 2), Math.min(innerHeight - 60, box.top + Math.min(box.height, 60))];
}
