// What more compute will give, by a sigmoid: a table, lines, and for a run the fit.

const PREDICTED = "A sigmoid of accuracy against compute, R0 + (A − R0) / (1 + (C_mid / C)^B), fitted to the curve so far (ScaleRL, arXiv 2510.13786). "
  + "A is the ceiling, C_mid the compute after which half of the way is done, B how steep the way is. It predicts a run that goes on as it did: with the same learning rate, not with one that ends.";

/** Returns the section of predictions, none if there is no curve. */
function prediction() {
  const found = data.prediction;
  if (!found) return [];
  const drawn = found.series && html("div", { class: "charts" }, chart(found.metric, found.series, [0, found.series[1].x.at(-1)], [], found.compute.replace(/s$/, "")));
  return [section("prediction", "With more compute", html("p", { class: "soft" }, PREDICTED),
    found.rows.length ? table(found.head, found.rows) : null,
    ...found.lines.map((line) => html("p", { class: "soft" }, `${line[0].toUpperCase()}${line.slice(1)}.`)), drawn ?? null)];
}
