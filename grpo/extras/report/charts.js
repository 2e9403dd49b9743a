"use strict";
// Makes elements, formats numbers, and draws charts in SVG. All text enters the page as text nodes, so no completion is read as HTML.

const element = (space) => (tag, attributes = {}, ...children) => {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
};
const html = element("http://www.w3.org/1999/xhtml");
const svg = element("http://www.w3.org/2000/svg");
const section = (id, title, ...children) => html("section", { id }, html("h2", {}, title), ...children);

const unitOf = (name) => data.about[name]?.unit;

/** Returns a count with its noun: 1 run, 2 runs. */
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Returns a share in per cent, everywhere in the same form. */
const perCent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`.replace("-", "−");

/** Returns a number as text: shares in per cent, bytes in GB, seconds with their unit. */
function tell(value, unit) {
  if (value == null) return "–";
  if (unit === "share") return perCent(value);
  if (unit === "bytes") return value < 1e8 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;
  const end = unit === "seconds" ? " s" : "";
  if (end && value < 0.001) return "< 0.001 s";
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 }) + end;
  return (size > 0 && size < 0.001 ? value.toExponential(2) : String(+value.toPrecision(4))) + end;
}

/** Returns about `count` round numbers that cover the range from low to high. */
function ticks(low, high, count = 4) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((times) => times * power >= raw * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/** Returns round numbers for a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone if there are many. */
function logTicks(low, high) {
  const [least, most] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const powers = Array.from({ length: most - least + 1 }, (_, i) => 10 ** (least + i));
  const all = most - least > 2 ? powers : powers.flatMap((power) => [power, 2 * power, 5 * power]);
  const [first, last] = [all.findLastIndex((at) => at <= low * 1.0001), all.findIndex((at) => at >= high * 0.9999)];
  return all.slice(first, Math.max(last, first + 1) + 1);
}

const WINDOW = 9; // rollouts in the mean of a smooth curve

/** Returns the mean of each value with its neighbours. */
const smoothed = (points) => points.map((point, i) => {
  const near = points.slice(Math.max(0, i - (WINDOW >> 1)), i + (WINDOW >> 1) + 1);
  return { ...point, low: null, high: null, y: near.reduce((sum, p) => sum + p.y, 0) / near.length };
});

// what the reader has chosen; a page that loads itself again keeps it
const KEPT = `grpo ${location.pathname}`;
const view = { smooth: false, log: false, shown: null };
try { Object.assign(view, JSON.parse(sessionStorage.getItem(KEPT))); } catch { /* the browser keeps nothing */ }
const keep = () => {
  try { sessionStorage.setItem(KEPT, JSON.stringify(view)); } catch { /* the same */ }
  document.dispatchEvent(new Event("kept"));
};

const WIDTH = 360;
const HEIGHT = 190;
const RIGHT = 16;
const TOP = 10;
const BOTTOM = 24;
const COLOURS = 7;
const colour = (index) => `var(--c${index % COLOURS})`;
const dashes = (index) => (index >= COLOURS ? "6 3" : null);

/** labels: of ys. left: where the axes meet. */
function frame(x, y, xs, ys, labels, left) {
  const whole = xs.filter((at) => Number.isInteger(at));
  return svg("g", {},
    ys.map((at, i) => [
      svg("line", { class: "grid", x1: left, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, labels[i]),
    ]).flat(),
    whole.map((at) => svg("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, at.toLocaleString("en"))));
}

/** Returns the labels of an axis, with as many digits as tell them apart. even: whether the steps are equal. */
function axisLabels(ys, unit, even) {
  const most = Math.max(...ys.map(Math.abs));
  const [times, end] = unit === "share" ? [100, "\u00a0%"] : unit === "bytes" ? (most < 1e9 ? [1e-6, "\u00a0MB"] : [1e-9, "\u00a0GB"]) : [1, ""];
  if (!even) return ys.map((at) => String(+(times * at).toPrecision(3)) + end);
  const step = times * (ys[1] - ys[0]);
  const digits = [0, 1, 2, 3, 4, 5].find((n) => Math.abs(+step.toFixed(n) - step) < 1e-6 * step);
  return ys.map((at) => (digits == null ? tell(at) : (times * at || 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })).replace("-", "−") + end);
}

/** Returns what a metric is, and its range in healthy runs. */
const meaning = (name) => [data.about[name].words, data.about[name].healthy && `Healthy: ${data.about[name].healthy}.`].filter(Boolean).join(" ");

/**
 * Returns the range of an axis: all curves, and their intervals as far as they extend it by at most its own length on either side.
 * Intervals over few seeds can be very wide.
 */
function reach(points, share) {
  const values = points.map((p) => p.y);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  if (least === 0 && most === 0) return [0, 1];
  const flat = most - least <= 1e-9 * Math.abs(most);
  const room = flat ? Math.abs(most) / 10 : most - least;
  const bounds = flat ? [least - room, most + room] : points.flatMap((p) => [p.low, p.high]).filter((bound) => bound != null);
  const low = Math.max(least - room, Math.min(least, ...bounds));
  const high = Math.min(most + room, Math.max(most, ...bounds));
  const zero = low > 0 && low < 0.6 * high;
  return share ? [Math.max(0, zero ? 0 : low), Math.min(1, high)] : [zero ? 0 : low, high];
}

/**
 * Returns a figure of one metric against rollouts. series: [{label, index, x, y, low?, high?, thin?}], null in y for unknown values.
 * span: the first and the last rollout of the axis. marks: [{rollout, words}], shown under the curve. across: what the axis counts. The pointer or the arrow keys show values.
 */
function chart(name, series, span, marks = [], across = "rollout") {
  const { unit } = data.about[name];
  const caption = [html("figcaption", {}, name), html("p", { class: "words" }, meaning(name))];
  const raw = series.map(({ x, y, low, high }) =>
    x.map((at, i) => ({ at, y: y[i], low: low?.[i] ?? null, high: high?.[i] ?? null })).filter((p) => p.y != null));
  if (!raw.some((list) => list.length)) return html("figure", { class: "card" }, caption, html("p", { class: "soft" }, "no value"));
  const smooth = view.smooth && raw.some((list) => list.length > WINDOW);
  if (smooth) series = [...series, ...series.map((one) => ({ ...one, thin: true }))];
  const points = smooth ? [...raw.map(smoothed), ...raw] : raw;
  const every = points.flat();
  const log = view.log && every.every((p) => p.y > 0);

  const xs = [...new Set(every.map((p) => p.at))].sort((a, b) => a - b);
  const values = every.map((p) => p.y);
  const ys = log ? logTicks(Math.min(...values), Math.max(...values)) : ticks(...reach(every, unit === "share"));
  const scale = log ? Math.log10 : (value) => value;
  const [low, high] = [ys[0], ys.at(-1)];
  const labels = axisLabels(ys, unit, !log);
  const left = 14 + 6.2 * Math.max(3, ...labels.map((label) => label.length)); // units of a letter
  const [first, last] = [span[0], Math.max(span[1], span[0] + 1)];
  const x = (at) => left + ((at - first) / (last - first)) * (WIDTH - left - RIGHT);
  const y = (value) => TOP + ((scale(high) - scale(Math.max(low, Math.min(high, value)))) / (scale(high) - scale(low))) * (HEIGHT - TOP - BOTTOM);
  const path = (list) => list.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");

  const cursor = svg("g", {});
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
    "aria-label": `${name} against ${across}s; arrow keys show values` }, frame(x, y, ticks(first, last).filter((at) => at >= first && at <= last), ys, labels, left));
  series.forEach(({ index, thin }, s) => {
    const banded = points[s].filter((p) => p.low != null && p.high != null);
    const stroke = colour(index);
    if (banded.length && points[s].length <= 30 && series.length === 1)
      picture.append(...banded.map((p) => svg("line", { stroke, opacity: 0.55, x1: x(p.at), x2: x(p.at), y1: y(p.low), y2: y(p.high) })));
    else if (banded.length)
      picture.append(svg("path", { fill: stroke, opacity: 0.16,
        d: path(banded.map((p) => [p.at, p.high])) + path(banded.map((p) => [p.at, p.low]).reverse()).replace("M", "L") + "Z" }));
    picture.append(svg("path", { class: "curve", fill: "none", stroke, "stroke-width": thin ? 0.8 : 1.8, opacity: thin ? 0.6 : 1,
      "stroke-dasharray": dashes(index), "stroke-linejoin": "round", d: path(points[s].map((p) => [p.at, p.y])) }));
    if (points[s].length <= 30 && !thin) picture.append(...points[s].map((p) => svg("circle", { cx: x(p.at), cy: y(p.y), r: 2.2, fill: stroke })));
  });
  for (const { rollout, words } of marks)
    picture.append(svg("path", { fill: "var(--bad)", d: `M${x(rollout)} ${HEIGHT - BOTTOM - 7}l5 8h-10z` }, svg("title", {}, words)));
  picture.append(cursor);

  const tip = html("div", { class: "tip", hidden: true });
  const figure = html("figure", { class: "card" }, caption, picture, tip);
  let here = xs.length - 1;
  const show = (i) => {
    here = Math.max(0, Math.min(xs.length - 1, i));
    const at = xs[here];
    const found = series.map((one, s) => [one, points[s].find((p) => p.at === at)]).filter(([one, p]) => p && !one.thin);
    cursor.replaceChildren(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }),
      ...found.map(([one, p]) => svg("circle", { cx: x(at), cy: y(p.y), r: 3.5, fill: colour(one.index) })));
    tip.replaceChildren(html("div", { class: "soft" }, `${across} ${at.toLocaleString("en", { maximumFractionDigits: 0 })}`), ...found.map(([one, p]) =>
      html("div", {}, `${one.label ? one.label + ": " : ""}${tell(p.y, unit)}`,
        p.low == null ? null : html("span", { class: "soft" }, `  ${tell(p.low, unit)} to ${tell(p.high, unit)}`))));
    tip.hidden = false;
    tip.style.left = `${Math.max(4, Math.min(figure.clientWidth - tip.offsetWidth - 4, (x(at) / WIDTH) * picture.getBoundingClientRect().width + 26))}px`;
  };
  const hide = () => { cursor.replaceChildren(); tip.hidden = true; };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = first + ((((event.clientX - box.left) / box.width) * WIDTH - left) / (WIDTH - left - RIGHT)) * (last - first);
    show(xs.reduce((best, value, i) => (Math.abs(value - at) < Math.abs(xs[best] - at) ? i : best), 0));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("focus", () => picture.matches(":focus-visible") && show(here));
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); show(here + step); }
  });
  return figure;
}

/** Returns a sample of a colour. */
const swatch = (index) => svg("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" },
  svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour(index), "stroke-width": 4, "stroke-dasharray": dashes(index) }));

/** Returns labels with their colours. colours: numbers of colours, if not 0, 1, 2 ... */
const legend = (labels, colours = labels.map((_, i) => i)) => html("div", { class: "legend" }, labels.map((label, i) => html("span", {}, swatch(colours[i]), ` ${label}`)));

/** Returns a line of metrics that never change. valueOf(name): the value. */
const constants = (names, valueOf, id) => html("p", { class: "soft", id }, "Constant: ",
  names.map((name, i) => html("span", { title: meaning(name) }, `${i ? ", " : ""}${name} ${tell(valueOf(name), unitOf(name))}`)), ".");

/**
 * Returns switches, groups of charts, and a checkbox for each metric that shows or hides its chart. drawn(name) returns its figure.
 * values(name): all its values; metrics that never change share one line instead of a chart each.
 */
function curves(groups, names, drawn, values) {
  const shown = new Set(view.shown ?? groups.flatMap(([, wanted]) => wanted.filter((name) => names.includes(name))));
  const place = html("div", {});
  const draw = () => {
    const known = new Set(groups.flatMap(([, wanted]) => wanted));
    const all = [...groups, ["Picked", names.filter((name) => !known.has(name))]];
    const constant = names.filter((name) => shown.has(name) && values(name).length > 1 && new Set(values(name)).size === 1);
    place.replaceChildren(...all.flatMap(([title, wanted]) => {
      const found = wanted.filter((name) => shown.has(name) && !constant.includes(name));
      return found.length ? [html("h3", {}, title), html("div", { class: "charts" }, found.map(drawn))] : [];
    }));
    if (constant.length) place.append(constants(constant, (name) => values(name)[0], "constant"));
  };
  const turn = (name, label) => html("label", {}, html("input", { type: "checkbox", id: name, checked: view[name],
    change: (event) => { view[name] = event.target.checked; draw(); keep(); } }), ` ${label}`);
  const switches = [turn("smooth", "smooth"), turn("log", "log scale")];
  const boxes = names.map((name) => html("label", { title: meaning(name) }, html("input", { type: "checkbox", value: name, checked: shown.has(name), change: (event) => {
    shown[event.target.checked ? "add" : "delete"](name);
    view.shown = [...shown];
    draw();
    keep();
  } }), ` ${name}`));
  draw();
  const picker = html("details", { class: "card", id: "picker" }, html("summary", {}, `Metrics (${names.length})`), html("div", { class: "picker" }, boxes));
  return { place, picker, draw, switches };
}
