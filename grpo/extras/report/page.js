// Builds the page from the JSON data in it.

const data = JSON.parse(document.getElementById("data").textContent);

const busy = () => document.hidden || document.querySelector("#detail[data-open]") || document.activeElement?.matches("input, select, button");

/** Returns a mark of a page that loads itself again, which it does while nobody reads a sample or uses a switch. */
function live() {
  const mark = html("span", { class: "pill soft", id: "live" }, "live");
  setInterval(() => {
    if (!busy()) location.reload();
    mark.textContent = busy() ? "live, waits while you read" : "live";
  }, 1000 * data.live);
  return mark;
}

const facts = (pairs) => html("div", { class: "facts" }, pairs.map(([name, value]) => html("div", {}, `${name} `, html("b", {}, value))));

function header() {
  const good = { finished: "good", failed: "bad", interrupted: "bad" };
  return html("header", {},
    html("div", { class: "row" }, html("h1", {}, data.name), data.status ? html("span", { class: `pill ${good[data.status] ?? "soft"}` }, data.status) : null, data.live ? live() : null),
    data.error ? html("p", { class: "bad text" }, data.error) : null,
    facts(data.facts.slice(0, 3)),
    html("div", { class: "numbers" }, data.numbers.map(({ label, value, note }) =>
      html("div", { class: "card" }, html("span", { class: "soft" }, label), html("strong", {}, value), html("span", { class: "soft" }, note ?? "")))));
}

/** Returns a table. words: the number of columns on the left that hold text. A narrow screen shows each row as lines with the heads. */
const table = (head, rows, words = 1) => html("div", { class: "card scroll" }, html("table", { class: "stacks" },
  html("thead", {}, html("tr", {}, head.map((cell, i) => html("th", { class: i < words ? "left" : null }, cell)))),
  html("tbody", {}, rows.map((row) => html("tr", {}, row.map((cell, i) => html("td", { class: i < words ? "left" : null, "data-head": head[i] }, cell)))))));

/** Returns a folded list of what each column is. pairs: [name, words]. */
const glossary = (pairs) => html("details", {}, html("summary", { class: "soft" }, "What the columns are"),
  html("dl", {}, pairs.flatMap(([name, words]) => [html("dt", {}, name), html("dd", {}, words)])));

/** Returns the opening of a run's page: held-out problems before and after training. */
function changes() {
  const { before, after, of, by, better, worse, problems } = data.changed;
  const [good, bad] = by === "correct" ? ["right", "wrong"] : ["better", "worse"];
  const shared = sharedStart(problems.map((one) => one.prompt));
  const verdictOf = ({ correct, reward }) => (by === "correct" ? (correct ? "right" : "wrong") : `reward ${tell(reward)}`);
  return [
    html("p", {}, `${better} of ${plural(of, "held-out problem")} became ${good}, and ${worse} became ${bad}, between the evaluations after ${before} and after ${plural(after, "rollout")}.`),
    ...problems.map((one) => {
      const sides = difference(one.before.completion, one.after.completion, false);
      return html("div", { class: "card problem" },
        html("div", { class: "text" }, withPictures(one.prompt, one.pictures, shared)),
        one.gold == null ? null : html("div", {}, html("span", { class: "soft" }, "right answer "), html("b", { class: "text gold" }, one.gold)),
        html("div", { class: "two" }, [one.before, one.after].map((side, i) => html("div", {},
          html("div", { class: side.correct ? "good" : by === "correct" ? "bad" : "soft" }, `${i ? "after" : "before"}: ${verdictOf(side)}, ${plural(side.tokens, "token")}`),
          html("div", { class: "text" }, side.completion ? sides[i].map(([text, both]) => (both ? text : html(i ? "ins" : "del", {}, text))) : "(nothing)")))));
    })];
}

function evaluations() {
  const { x, y } = data.metrics;
  const names = Object.keys(y).filter((name) => name.startsWith("eval/"));
  const rows = x.map((at, i) => [at, i]).filter(([, i]) => names.some((name) => y[name][i] != null));
  if (!rows.length) return html("p", { class: "soft" }, "This run was not evaluated.");
  const interval = (name, i) => {
    const bounds = data.intervals[name]?.[i];
    return bounds ? html("span", { class: "soft" }, ` ${(100 * bounds[0]).toFixed(1)} to ${(100 * bounds[1]).toFixed(1)}`) : null;
  };
  const differs = (name, from) => rows.some(([, i]) => y[name][i] !== from(i));
  const constant = names.filter((name) => rows.length > 1 && name !== "eval/accuracy" && !differs(name, () => y[name][rows[0][1]]));
  const same = names.filter((name) => name === "eval/accuracy_lenient" && !constant.includes(name) && y["eval/accuracy"] && !differs(name, (i) => y["eval/accuracy"][i]));
  const shown = names.filter((name) => !constant.includes(name) && !same.includes(name));
  return [table(["after rollouts", ...shown.map((name) => name.slice(5))],
    rows.map(([at, i]) => [String(at), ...shown.map((name) => html("span", {}, tell(y[name][i], unitOf(name)), interval(name, i)))])),
    constant.length ? constants(constant, (name) => y[name][rows[0][1]], "constant-results") : null,
    same.length ? html("p", { class: "soft" }, "accuracy_lenient is the same as accuracy.") : null,
    glossary(names.map((name) => [name.slice(5), meaning(name)]))];
}

function health() {
  if (!data.metrics.x.length) return html("p", { class: "soft" }, "Nothing was measured.");
  const lost = Object.entries(data.not_written);
  const missing = [html("p", { class: "bad" }, "The disk was full. These files are missing:"), table(["file", "reason"], lost, 2)];
  const warned = data.warnings.map((w) => [String(w.rollout), w.metric, tell(w.value, unitOf(w.metric)), w.words]);
  return [...(lost.length ? missing : []), warned.length
    ? table(["rollout", "metric", "value", "meaning and advice"], warned, 4)
    : html("p", {}, html("span", { class: "good" }, "✓ "), "All watched metrics stayed in their healthy ranges.")];
}

function run() {
  const { x, y } = data.metrics;
  const names = Object.keys(y);
  const { place, picker, switches } = curves(data.groups, names, (name) => {
    const bounds = data.intervals[name];
    const marks = data.warnings.filter((w) => w.metric === name);
    return chart(name, [{ label: "", index: 0, x, y: y[name], low: bounds?.map((b) => b?.[0]), high: bounds?.map((b) => b?.[1]) }], [x[0], x.at(-1)], marks);
  }, (name) => y[name].filter((value) => value != null));
  return [
    ...(data.changed ? [section("changed", "Before and after", changes())] : []),
    section("curves", "Curves", html("p", { class: "soft" }, "The x-axis counts rollouts learned from. Bars on accuracy are 95 % intervals over problems. To read values, point at a curve, or focus it and use the arrow keys."), html("div", { class: "row" }, switches), place, picker),
    section("evaluation", "Held-out evaluation", evaluations()),
    ...prediction(),
    section("time", "Timeline", ...data.waits.map((line) => html("p", { class: "waits" }, line)), timeline(x, y)),
    section("health", "Health", health()),
    section("samples", "Samples", html("p", { class: "soft", id: "left" }, data.left), ...(data.steps.length ? browser(data) : [])),
    section("configuration", "Configuration", facts(data.facts.slice(3)), html("h3", {}, "Command line"), html("div", { class: "card text", id: "overrides" }, data.overrides.join("\n") || "all defaults"),
      html("details", { class: "card" }, html("summary", {}, "Every value"), html("pre", {}, data.config))),
  ];
}

/** Goes to a section without a change of the address, which holds a choice. */
const jump = (event) => {
  event.preventDefault();
  document.querySelector(event.target.getAttribute("href")).scrollIntoView();
};

const sections = { run, folder }[data.kind]();
document.body.append(header(),
  html("nav", { "aria-label": "sections" }, html("div", {}, sections.map((one) => html("a", { href: `#${one.id}`, click: data.kind === "folder" ? jump : null }, one.querySelector("h2").textContent)))),
  html("main", {}, ...sections, html("p", { class: "soft" }, `Written ${data.written} by python -m grpo.report.`)));
