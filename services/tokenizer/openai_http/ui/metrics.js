// Figures of /metrics, read from Prometheus' text, and what follows from two of them.

const PREFIX = "triptych:";

/** The engine's plain figures by name, without prefix and labels. Histograms are left out. */
export function parse(text) {
  const figures = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const [, name, value] = /^([a-z_:0-9]+)(?:\{[^}]*\})? ([^ ]+)/.exec(line) ?? [];
    if (name === undefined || name.endsWith("_bucket")) continue;
    const key = name.slice(PREFIX.length);
    figures.set(key, (figures.get(key) ?? 0) + Number(value));
  }
  return figures;
}

/** How much a counter grew a second between two readings, `seconds` apart. NaN: not known. */
export function rate(before, after, name, seconds) {
  const grown = (after.get(name) ?? NaN) - (before?.get(name) ?? NaN);
  return grown < 0 ? NaN : grown / seconds; // it began anew
}

/** The share of looked-up prompt tokens that the cache had, since the start. NaN: none yet. */
export function hitShare(figures) {
  return (figures.get("prefix_cache_hits_total") ?? NaN) / figures.get("prefix_cache_queries_total");
}
