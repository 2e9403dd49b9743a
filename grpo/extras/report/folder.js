// The page of several runs, of a sweep or of any folder: a table to sort, filter and choose from, and of the chosen runs the curves,
// the comparison and the answers. The address holds the choice, so a link shows the same to others.

const FEWEST = 4; // seeds for a band: the interval of fewer is so wide that it hides the curves
const chosenBy = { run: null, sort: "", filter: "", against: "", problem: "" }; // run: a set of names; null: those of the first arms

/** Takes the choice from the address; it comes before what the browser keeps of the last visit. */
function readLink() {
  const held = new URLSearchParams(location.hash.slice(1));
  if (!held.size) return;
  for (const name of ["sort", "filter", "against", "problem"]) chosenBy[name] = held.get(name) ?? "";
  if (held.has("run")) chosenBy.run = new Set(held.getAll("run"));
  Object.assign(view, { smooth: held.has("smooth"), log: held.has("log"), shown: held.has("metric") ? held.getAll("metric") : null });
}

function writeLink() {
  const held = new URLSearchParams();
  for (const name of ["sort", "filter", "against", "problem"]) if (chosenBy[name]) held.set(name, chosenBy[name]);
  if (chosenBy.run) for (const name of chosenBy.run.size ? chosenBy.run : [""]) held.append("run", name);
  for (const name of ["smooth", "log"]) if (view[name]) held.set(name, 1);
  for (const name of view.shown ?? []) held.append("metric", name);
  history.replaceState(null, "", `#${held}`);
}

const asText = (value) => (value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
const inOrder = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : asText(a).localeCompare(asText(b), "en", { numeric: true }));

/** Returns the end of a key that no other key has: lr of optim.optimizer.lr. */
function shortName(name, names) {
  const parts = name.split(".");
  const ends = parts.map((_, i) => parts.slice(-1 - i).join("."));
  return ends.find((end) => names.filter((other) => `.${other}`.endsWith(`.${end}`)).length === 1) ?? name;
}

/** Returns the columns of the table: {name, label, words, of, cell}. of(run): its value, null if unknown. */
function columnsOf() {
  const links = ({ name, link }) => (link ? html("a", { href: link }, name) : name);
  const good = { finished: "good", running: "soft" };
  const own = [
    ["run", "The run's folder; its page opens with a click.", (run) => run.name, links],
    ["status", "finished, running, failed, interrupted, or stopped.", (run) => run.status, (run) => html("span", { class: good[run.status] ?? "bad" }, run.status)],
    ["error", "What ended the run.", (run) => run.error, (run) => run.error ?? ""]];
  const numbers = [["seed", "The seed."], ["started", "When the run began."], ["rollouts", "Rollouts learned from."], ["minutes", "Time of rollouts, updates and evaluations."],
    ["reward", "Mean reward of the last rollout."], ["accuracy", "The latest held-out accuracy.", "share"], ["best", "The best held-out accuracy.", "share"]];
  const names = [...own, ...numbers].map(([name]) => name).concat(data.differ.map(({ name }) => name));
  return [
    ...own.map(([name, words, of, cell]) => ({ name, label: name, words, of, cell, text: true })),
    ...data.differ.map(({ name, also }, i) => ({ name, label: shortName(name, names), of: (run) => run.values[i], cell: (run) => asText(run.values[i]), text: true,
      words: name + (also.length ? `; with it differ ${also.join(", ")}` : "") })),
    ...numbers.map(([name, words, unit]) => ({ name, label: name, words, of: (run) => run[name],
      cell: (run) => (name === "minutes" ? run.minutes?.toFixed(1) ?? "–" : typeof run[name] === "number" && name !== "seed" ? tell(run[name], unit) : asText(run[name])) })),
  ].filter(({ of }) => data.runs.some((run) => of(run) != null));
}

/** Returns whether a run passes a filter: words that its row has, and conditions such as lr=1e-4, accuracy>0.5, status!=failed. */
function passes(run, filter, columns) {
  const text = columns.map(({ of }) => asText(of(run))).join("\n").toLowerCase();
  return filter.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const [, name, sign, wanted] = /^([^=<>!]+)(!=|>=|<=|=|<|>)(.*)$/.exec(word) ?? [];
    const column = columns.find((one) => name && `.${one.name.toLowerCase()}`.endsWith(`.${name}`));
    if (!column) return text.includes(word);
    if (column.of(run) == null) return sign === "!=";
    const value = asText(column.of(run)).toLowerCase();
    const far = [value, wanted].some((side) => side === "" || Number.isNaN(+side)) ? value.localeCompare(wanted) : value - wanted;
    return { "=": far === 0, "!=": far !== 0, ">": far > 0, "<": far < 0, ">=": far >= 0, "<=": far <= 0 }[sign];
  });
}

/** Returns a run with curves of each seed, a finished one if there is any, else the first, which is the newest on the page of a
 * folder. Runs that ended early are left out if others of the arm did not: a mean would end with them. */
function seedsOf(runs) {
  const drawn = runs.filter(({ curves }) => curves.x?.length);
  const whole = ["finished", "running"].flatMap((wanted) => drawn.filter(({ status }) => status === wanted));
  return (whole.length ? whole : drawn).filter((run, i, all) => all.findIndex(({ seed }) => seed === run.seed) === i);
}

/** Returns the mean of a metric over the runs that have it, against rollouts, where all of them have a value: a mean of some jumps.
 * With FEWEST runs it has Student's 95 % interval. */
function over(every, name) {
  const at = new Map();
  const runs = every.filter(({ curves }) => curves.y?.[name]);
  for (const { curves } of runs)
    curves.y[name].forEach((y, i) => { if (y != null) at.set(curves.x[i], [...(at.get(curves.x[i]) ?? []), y]); });
  const points = [...at].filter(([, ys]) => ys.length === runs.length).sort(([a], [b]) => a - b).map(([x, ys]) => {
    const n = ys.length;
    const y = ys.reduce((sum, one) => sum + one, 0) / n;
    if (n < FEWEST) return { x, y, low: null, high: null };
    const half = data.t[n - 2] * Math.sqrt(ys.reduce((sum, one) => sum + (one - y) ** 2, 0) / (n - 1) / n);
    const [least, most] = unitOf(name) === "share" ? [0, 1] : [-Infinity, Infinity];
    return { x, y, low: Math.max(least, y - half), high: Math.min(most, y + half) };
  });
  return Object.fromEntries(["x", "y", "low", "high"].map((part) => [part, points.map((point) => point[part])]));
}

/** Returns p-values adjusted for their number (Holm 1979), as grpo.extras.report.statistics.holm does. */
function holm(values) {
  let least = 0;
  const adjusted = [];
  for (const [rank, [p, i]] of values.map((p, i) => [p, i]).sort(([a], [b]) => a - b).entries())
    adjusted[i] = least = Math.max(least, Math.min(1, p * (values.length - rank)));
  return adjusted;
}

/** Returns how arm b differs from arm a, on the problems of both; undefined if the page does not know. */
function pair(a, b) {
  const found = data.pairs[`${a} ${b}`];
  if (found) return found;
  const { difference, difference_low, difference_high, better, worse, ...same } = data.pairs[`${b} ${a}`] ?? {};
  return same.p == null ? undefined : { ...same, difference: -difference, difference_low: -difference_high, difference_high: -difference_low, better: worse, worse: better };
}

const COMPARED = "Held-out accuracy of the finished runs in their last evaluation, as eval.py compare gives it: of all seeds of an arm, whichever "
  + "are chosen, with one run of each seed. Intervals are 95 %: they cover other seeds and other problems if an arm has several seeds, and other problems only if it has one. "
  + "Differences are in percentage points, on the problems that both arms have; Holm's p-value corrects for the number of comparisons.";

/** Returns sentences about rows of the comparison with few problems, or none, in common. first: the row the others are compared with. */
function fewInCommon(rows, first) {
  const few = (n, of) => (n ? `only ${n} of ${plural(of, "problem")}` : "no problem");
  const rank = ({ arm }) => data.arms.slice(0, arm).filter(({ seeds }) => seeds).length;
  const said = rows.filter((row) => row.seeds).flatMap((row) => {
    const own = row.n ?? 0;
    const n = row.p == null ? 0 : row.better + row.worse + row.ties;
    const most = Math.max(own, first.n ?? 0);
    if (own < row.asked / 2) return [`The seeds of ${row.label} have ${few(own, row.asked)} in common.`];
    if (row === first || n >= most / 2) return [];
    if (Math.max(rank(row), rank(first)) >= data.compared) return [`The page compares the first ${plural(data.compared, "arm")} alone.`];
    return [`${row.label} and ${first.label} have ${few(n, most)} in common.`];
  });
  return [...new Set(said)];
}

/** Returns the comparison of arms with one of them. */
function comparison(arms, runs, changed) {
  const known = arms.filter((arm) => data.arms[arm].value != null);
  const first = known.find((arm) => runs.some((run) => run.arm === arm && run.name === chosenBy.against)) ?? known[0];
  const against = html("select", { id: "against", "aria-label": "compare with", change: () => { chosenBy.against = against.value; changed(); } },
    known.map((arm) => html("option", { value: runs.find((run) => run.arm === arm).name, selected: arm === first }, data.arms[arm].label)));
  const rows = arms.map((arm) => ({ arm, ...data.arms[arm], ...(arm === first ? {} : pair(first, arm)) }));
  const tested = rows.filter((row) => row.p != null);
  holm(tested.map((row) => row.p)).forEach((p, i) => { tested[i].holm = p; });
  const points = (value) => (100 * value).toFixed(1).replace("-", "−");
  const range = (low, high) => (low == null ? null : html("span", { class: "soft" }, ` ${points(low)} to ${points(high)}`));
  const cells = rows.map((row) => [row.label, String(row.seeds), row.after.join(", ") || "–", row.value == null ? "–" : String(row.n), row.value == null ? "–" : html("span", {}, perCent(row.value), range(row.low, row.high)),
    ...(row.p == null ? ["–", "–", "–", "–"] : [html("span", {}, points(row.difference), range(row.difference_low, row.difference_high)), tell(row.p), tell(row.holm), `${row.better} / ${row.worse} / ${row.ties}`])]);
  return [known.length > 1 ? html("p", { class: "row" }, html("label", { for: "against" }, "compare with"), against) : null,
    table(["arm", "seeds", "after rollouts", "problems", "held-out accuracy", "difference", "p", "p (Holm)", "better / worse / ties"], cells),
    ...fewInCommon(rows, rows.find((row) => row.arm === first) ?? rows[0]).map((words) => html("p", { class: "soft" }, words))];
}

/** Returns the answers of runs to one problem, side by side. */
function sideBySide(runs, looks, changed) {
  const said = ({ said }) => runs.filter((run) => said[run.place]);
  const asked = data.problems.filter((one) => said(one).length);
  if (!asked.length) return [html("p", { class: "soft" }, "The chosen runs have no saved answers of an evaluation.")];
  const verdicts = (one) => said(one).map((run) => verdict(one.said[run.place]));
  const differs = (one) => new Set(verdicts(one).map(([mark]) => mark)).size > 1;
  const problems = [...asked.filter(differs), ...asked.filter((one) => !differs(one))];
  const here = Math.max(0, problems.findIndex((one) => one.item === chosenBy.problem));
  const one = problems[here];
  const go = (i) => { chosenBy.problem = problems[Math.max(0, Math.min(problems.length - 1, i))].item; changed(); };
  const shared = sharedStart(problems.map(({ prompt }) => prompt ?? ""));
  const pick = html("select", { id: "problem", "aria-label": "problem", change: () => go(+pick.value) }, problems.map((each, i) =>
    html("option", { value: i, selected: i === here }, `${verdicts(each).map(([mark]) => mark).join("")} ${(each.prompt ?? "").slice(shared).slice(0, 80)}`)));
  const shown = said(one);
  const texts = shown.map((run) => one.said[run.place].completion || "(nothing)");
  const sides = shown.length === 2 ? difference(...texts, false) : texts.map((text) => [[text, true]]);
  return [
    html("p", { class: "soft" }, `The chosen runs differ on ${asked.filter(differs).length} of ${plural(asked.length, "problem")}${data.asked > data.problems.length ? ` (of ${data.asked}; a page has room for some)` : ""}, which come first. Each run's first answer in its last evaluation.`),
    html("div", { class: "row" }, html("button", { "aria-label": "previous", click: () => go(here - 1) }, "◀"), pick, html("button", { "aria-label": "next", click: () => go(here + 1) }, "▶")),
    html("div", { class: "card problem" }, html("div", { class: "text" }, withPictures(one.prompt ?? "", one.pictures, shared)),
      one.gold == null ? null : html("div", {}, html("span", { class: "soft" }, "right answer "), html("b", { class: "text gold" }, one.gold))),
    html("div", { class: "members answers" }, shown.map((run, i) => {
      const answer = one.said[run.place];
      const [mark, word, style] = verdict(answer);
      return html("div", { class: "card" }, html("div", {}, swatch(looks.get(run.arm)), ` ${run.name}`),
        html("div", { class: style }, `${mark} ${word}, reward ${tell(answer.reward)}, ${plural(answer.tokens, "token")}`),
        html("div", { class: "text" }, sides[i].map(([text, both]) => (both ? text : html(i ? "ins" : "del", {}, text)))));
    }))];
}

function folder() {
  readLink();
  data.runs.forEach((run, place) => { run.place = place; });
  const columns = columnsOf();
  const isChosen = (run) => (chosenBy.run ? chosenBy.run.has(run.name) : run.arm < COLOURS);
  const chosen = () => data.runs.filter(isChosen);
  const looks = () => new Map([...new Set(chosen().map((run) => run.arm))].map((arm, i) => [arm, i])); // colours by arm
  const choose = (runs) => { chosenBy.run = new Set(runs.map((run) => run.name)); changed(); };

  const wanted = () => {
    const [down, name] = [chosenBy.sort.startsWith("-"), chosenBy.sort.replace("-", "")];
    const found = data.runs.filter((run) => passes(run, chosenBy.filter, columns));
    const by = columns.find((column) => column.name === name);
    if (!by) return found;
    const known = found.filter((run) => by.of(run) != null).sort((a, b) => (down ? -1 : 1) * inOrder(by.of(a), by.of(b)));
    return [...known, ...found.filter((run) => by.of(run) == null)];
  };
  const heading = ({ name, label, words, text }) => {
    const way = { [name]: "ascending", [`-${name}`]: "descending" }[chosenBy.sort] ?? "none";
    return html("th", { "aria-sort": way, class: text ? "left" : null }, html("button", { title: words, "data-sort": name, click: () => {
      chosenBy.sort = way === "ascending" ? `-${name}` : name;
      listed();
      place.querySelector(`[data-sort="${CSS.escape(name)}"]`).focus();
    } }, label, { ascending: " ▲", descending: " ▼", none: "" }[way]));
  };
  const place = html("div", { class: "card scroll tall" });
  const count = html("span", { class: "soft", id: "count", role: "status" });
  const filter = html("input", { type: "search", id: "filter", value: chosenBy.filter, placeholder: "words, key=value, accuracy>0.5", "aria-label": "filter",
    input: () => { chosenBy.filter = filter.value; listed(); } });
  const list = () => {
    const [found, look] = [wanted(), looks()];
    const every = html("input", { type: "checkbox", "aria-label": "choose all of these", checked: found.length > 0 && found.every(isChosen),
      change: () => choose(data.runs.filter((run) => (found.includes(run) ? every.checked : isChosen(run)))) });
    const rows = found.map((run) => {
      const box = html("input", { type: "checkbox", value: run.name, "aria-label": `choose ${run.name}`, checked: isChosen(run),
        change: () => { choose(data.runs.filter((one) => (one === run ? box.checked : isChosen(one)))); place.querySelector(`[value="${CSS.escape(run.name)}"]`)?.focus(); } });
      return html("tr", {}, html("td", {}, html("label", { class: "box" }, box, isChosen(run) ? swatch(look.get(run.arm)) : null)),
        columns.map((column) => html("td", { class: column.text ? "left" : null, "data-head": column.label }, column.cell(run))));
    });
    place.replaceChildren(html("table", { class: "stacks sorts", id: "list" }, html("thead", {}, html("tr", {}, html("th", {}, every), columns.map(heading))), html("tbody", {}, rows)));
    count.textContent = `${found.length} of ${plural(data.runs.length, "run")}, ${chosen().length} chosen`;
  };

  const each = html("input", { type: "checkbox", id: "seeds", change: () => draw() });
  const thin = (runs) => (runs.length > 1 && (each.checked || seedsOf(runs).length < FEWEST) ? runs : []);
  const { place: charts, picker, draw, switches } = curves(data.groups, Object.keys(data.metrics), (name) => {
    const arms = [...Map.groupBy(chosen(), (run) => run.arm)];
    const ends = chosen().flatMap(({ curves }) => (curves.x?.length ? [curves.x[0], curves.x.at(-1)] : []));
    return chart(name, [
      ...arms.flatMap(([, runs], index) => thin(runs).map((run) => ({ ...over([run], name), index, thin: true }))),
      ...arms.map(([arm, runs], index) => ({ ...over(seedsOf(runs), name), index, label: data.arms[arm].label })),
    ], [Math.min(...ends), Math.max(...ends)]);
  }, (name) => chosen().flatMap((run) => (run.curves.y?.[name] ?? []).filter((value) => value != null)));
  const [key, compared, answers] = [html("div", {}), html("div", {}), html("div", {})];
  const below = () => {
    const look = looks();
    key.replaceChildren(legend([...look.keys()].map((arm) => data.arms[arm].label)));
    compared.replaceChildren(...(look.size ? comparison([...look.keys()], chosen(), changed) : ["No run is chosen."]).filter(Boolean));
    answers.replaceChildren(...sideBySide(chosen(), look, changed));
  };
  const listed = () => { list(); writeLink(); };
  const changed = () => { listed(); draw(); below(); };
  document.addEventListener("kept", writeLink);
  addEventListener("hashchange", () => location.reload());
  list();
  below();

  const links = data.sweeps.map(({ name, link }) => [link ? html("a", { href: link }, name) : name]);
  const evaluated = data.evaluations.map((one) => [one.name, one.of, one.started ?? "–", one.problems ?? "–", tell(one.accuracy, "share")]);
  const failed = data.runs.filter((run) => !["finished", "running"].includes(run.status));
  return [
    section("runs", "Runs", html("p", { class: "soft" }, "Columns after the status are the settings that differ between the runs, apart from the runs' own seeds and folders. Below are the chosen runs; the address of this page holds the choice, the filter and the order."),
      failed.length ? html("p", { class: "bad" }, `${failed.length} of ${plural(data.runs.length, "run")} did not finish.`) : null,
      html("div", { class: "row" }, filter, html("button", { id: "only", click: () => choose(wanted()) }, "choose only these"), html("button", { click: () => choose([]) }, "choose none"), count),
      place, glossary(columns.map(({ label, words }) => [label, words]))),
    section("curves", "Curves", html("p", { class: "soft" }, `Mean over the chosen runs that differ in the seed alone, of each seed a finished one or the newest; runs that ended early count only if no other went on. It is drawn where all of them have a value. Two or three seeds are drawn as thin lines; from four on, a band is the 95 % interval over seeds alone (Student's t). To read values, point at a curve, or focus it and use the arrow keys.${data.every > 1 ? ` The page has every ${data.every}th rollout.` : ""}`),
      key, html("div", { class: "row" }, html("label", {}, each, " every seed"), switches), charts, picker),
    section("arms", "Comparison", html("p", { class: "soft" }, COMPARED), compared),
    ...prediction(),
    section("answers", "Answers side by side", answers),
    ...(links.length ? [section("sweeps", "Sweeps", table(["sweep"], links))] : []),
    ...(evaluated.length ? [section("evaluations", "Evaluations", table(["folder", "policy", "started", "problems", "accuracy"], evaluated, 3))] : []),
  ];
}
