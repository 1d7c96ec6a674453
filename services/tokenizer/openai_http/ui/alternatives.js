// The little table beside a token: what else might have stood there, and how likely.

import { byId, make } from "./dom.js";

const rowsOf = new WeakMap();
const table = byId("alternatives");
let shown = null;

/** A part of an answer as nodes: a token behind its white space, or plain text where none is known. */
export function partNodes({ text, rows }) {
  if (rows === null) return [text];
  const bare = text.trimStart() || text;
  const least = Math.min(...rows.map((row) => row.logprob));
  const span = make("span", { class: `t ${doubt(Math.exp(least), bare)}`, tabindex: "-1" }, bare);
  rowsOf.set(span, rows);
  return [text.slice(0, text.length - bare.length), span];
}

/** Show alternatives of tokens inside `log`, by pointer, tap, focus and arrow keys. */
export function watchTokens(log) {
  const tokenAt = (event) => event.target.closest?.(".t");
  log.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    const token = tokenAt(event);
    if (token) show(token);
    else if (document.activeElement !== shown) hide();
  });
  log.addEventListener("pointerleave", () => document.activeElement !== shown && hide());
  log.addEventListener("click", (event) => {
    if (!window.getSelection().isCollapsed) return; // somebody selects text
    const token = tokenAt(event);
    if (token) token.focus();
    else hide();
  });
  log.addEventListener("focusin", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  log.addEventListener("focusout", hide);
  log.addEventListener("scroll", () => shown && place(shown), { passive: true });
  log.addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    const to = token && neighbour(token, event.key);
    if (!to) return;
    event.preventDefault();
    to.focus();
    to.scrollIntoView({ block: "nearest" });
  });
}

/** Hide the table. Returns whether it was shown. */
export function hide() {
  if (shown === null) return false;
  shown.removeAttribute("aria-describedby");
  shown.classList.remove("shown");
  shown = null;
  table.hidden = true;
  return true;
}

/** Let Tab reach the first token of `box`; the others are reached from it. */
export function makeReachable(box) {
  box.querySelector(".t")?.setAttribute("tabindex", "0");
}

function neighbour(token, key) {
  const all = [...token.parentElement.querySelectorAll(".t")];
  const at = all.indexOf(token);
  return { ArrowRight: all[at + 1], ArrowLeft: all[at - 1], Home: all[0], End: all.at(-1) }[key];
}

function show(token) {
  if (shown === token) return;
  hide();
  shown = token;
  token.classList.add("shown");
  token.setAttribute("aria-describedby", table.id);
  table.replaceChildren(...rowsOf.get(token).map(rowTable));
  table.hidden = false;
  place(token);
}

function rowTable(row) {
  const top = row.top_logprobs;
  const taken = top.find((each) => each.token === row.token) ?? row;
  const list = make("ul");
  for (const each of top.includes(taken) ? top : [...top, row]) {
    const chance = Math.exp(each.logprob);
    const bar = make("i", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("inline-size", `${(100 * chance).toFixed(1)}%`);
    const drawn = each === taken;
    list.append(
      make("li", { class: drawn ? "drawn" : false }, bar,
        make("code", {}, visible(each.token)),
        make("span", {}, percent(chance)),
        drawn ? make("span", { class: "hidden" }, "(taken)") : ""),
    );
  }
  return list;
}

function place(token) {
  const [at] = token.getClientRects();
  if (!at) return;
  const { offsetWidth: width, offsetHeight: height } = table;
  const left = Math.max(8, Math.min(at.left, window.innerWidth - width - 8));
  const above = at.top - height - 6;
  table.style.setProperty("left", `${left}px`);
  table.style.setProperty("top", `${above < 8 ? at.bottom + 6 : above}px`);
}

function doubt(chance, text) {
  if (chance >= 0.3 || text.trim() === "") return "";
  return chance >= 0.05 ? "u1" : "u2";
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

function percent(chance) {
  if (chance < 0.0005) return "<0.1 %";
  return `${(100 * chance).toFixed(chance < 0.1 ? 1 : 0)} %`;
}
