// A figure with its recent past as a small area chart.

import { make, makeSvg } from "./dom.js";

const POINTS = 60;
const WIDTH = POINTS - 1;
const HEIGHT = 24;

export class Chart {
  #values = [];
  #most;
  #line = makeSvg("path", { class: "line" });
  #area = makeSvg("path", { class: "area" });
  #value = make("output", {}, "–");
  #picture;
  #name;

  /** `most`: the top of the scale; without one it follows the figures, from `least` on. */
  constructor(name, { most, least = 1 } = {}) {
    this.#name = name;
    this.#most = (values) => most ?? Math.max(least, ...values);
    this.#picture = makeSvg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.#area,
      this.#line,
    );
    this.element = make("figure", {}, make("figcaption", {}, name), this.#value, this.#picture);
    this.#describe("no figures yet");
  }

  /** The next point. `point` is drawn (NaN: a gap), `text` is written. */
  add(point, text) {
    this.#values.push(point);
    if (this.#values.length > POINTS) this.#values.shift();
    this.#value.textContent = text;
    this.#draw();
  }

  #draw() {
    const known = this.#values.filter((each) => !Number.isNaN(each));
    const most = this.#most(known);
    const from = POINTS - this.#values.length;
    let line = "";
    let area = "";
    let run = [];
    const close = () => {
      if (run.length) {
        line += `M${run.join("L")}`;
        area += `M${run[0].split(" ")[0]} ${HEIGHT}L${run.join("L")}L${run.at(-1).split(" ")[0]} ${HEIGHT}Z`;
      }
      run = [];
    };
    this.#values.forEach((value, index) => {
      if (Number.isNaN(value)) return close();
      const height = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / most);
      run.push(`${from + index} ${height.toFixed(2)}`);
    });
    close();
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", area);
    const peak = known.length ? `highest ${round(Math.max(...known))}` : "no figures";
    this.#describe(`${this.#value.textContent}; ${peak} in the last ${this.#values.length} readings`);
  }

  #describe(text) {
    this.#picture.setAttribute("aria-label", `${this.#name}: ${text}`);
  }
}

/** A number for people: three digits or so. */
export function round(value) {
  if (Number.isNaN(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)}k`;
  return value.toFixed(value >= 100 || Number.isInteger(value) ? 0 : 1);
}
