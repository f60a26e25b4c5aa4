// Small helpers to make elements and to write numbers.

/** Makes an element: h("p", {class: "x", onclick: f}, "text", child). */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  set(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for SVG. */
export function s(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

/** Sets a text only when it is another one, so that nothing is drawn for nothing. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Seconds as a reader likes them: 3 ms, 0.42 s, 12 s, 4 min. */
export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.95) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(0)} h`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function number(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** Paul Tol's light scheme: told apart with every kind of colour vision, and dark text can be read on all of them. */
const COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00"];
const OTHER = "#c9c9c4";

/** The colour of a request. */
export function colour(request) {
  return request ? COLOURS[request.hue] : OTHER;
}

/** A request's letter on its colour. */
export function chip(request) {
  const element = h("span", { class: "chip" }, request ? request.letter : "?");
  element.style.background = colour(request);
  return element;
}
