// The page's data, and its elements.

const data = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

// A new element. Texts become text nodes, so that no name is taken for markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A row of a table.
function row(...cells) {
  return element("tr", {}, ...cells);
}

function heading(text, className = "") {
  if (!text) return cell("", className);
  return element("th", { scope: "col", className }, text);
}

function cell(content, className = "") {
  return element("td", { className }, content);
}

// A cell with a bar in it, of a share of the cell's width.
function barCell(share, background) {
  return cell(element("i", { style: { width: `${100 * share}%`, background } }), "measure");
}
