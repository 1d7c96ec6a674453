// Elements are made here and nowhere else, and text is only ever set as text.

export const byId = (id) => document.getElementById(id);

/** A new element. Strings among `children` become text nodes. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** A new SVG element. */
export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === undefined) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Say something to who listens instead of looking. */
export function announce(text) {
  byId("status").textContent = text;
}
