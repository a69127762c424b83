"use strict";
// Shows tooltips. The page is complete without them: every figure is in a table as well.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const cross = document.createElement("div");
  cross.className = "cross";

  const row = (text, colour) => {
    const line = document.createElement("div");
    if (colour !== undefined) {
      const swatch = document.createElement("i");
      swatch.className = `s${colour}`;
      line.append(swatch);
    }
    line.append(text);
    return line;
  };

  const show = (event, rows) => {
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const above = event.clientY - box.height - 14;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
  };

  const hide = () => {
    tip.hidden = true;
    cross.remove();
  };

  const nearest = (points, at) => {
    let [low, high] = [0, points.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < at) low = middle;
      else high = middle;
    }
    return at - points[low][0] < points[high][0] - at ? points[low] : points[high];
  };

  const series = new Map();
  const seriesOf = (plot) => {
    if (!series.has(plot)) series.set(plot, JSON.parse(plot.dataset.points));
    return series.get(plot);
  };

  const point = (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) {
      cross.remove();
      return show(event, [row(target.dataset.tip)]);
    }
    const plot = event.target.closest?.(".plot[data-points]");
    if (!plot) return hide();
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * 100;
    const found = seriesOf(plot).filter((one) => one.points.length).map((one) => [one, nearest(one.points, at)]);
    if (!found.length) return hide();
    const closest = found.map(([, place]) => place[0]).reduce((a, b) => (Math.abs(a - at) <= Math.abs(b - at) ? a : b));
    cross.style.left = `${closest}%`;
    plot.append(cross);
    return show(event, found.map(([one, place]) => row(`${one.name}: ${place[2]}`, one.colour)));
  };

  addEventListener("pointermove", point);
  addEventListener("pointerdown", point);
  addEventListener("scroll", hide, { passive: true });
  document.addEventListener("pointerleave", hide);
})();
