"use strict";
// Says the text of the mark that a reader points at, and zooms into the timeline.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NARROW = 640;
  document.documentElement.classList.add("with-script");

  // The texts of marks, shown at once: a browser's own tooltips are late.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const texts = new WeakMap();
  for (const title of document.querySelectorAll("svg g > title")) {
    texts.set(title.parentNode, title.textContent);
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove();
  }
  document.addEventListener("mousemove", (event) => {
    let mark = event.target instanceof Element ? event.target.closest("svg g") : null;
    while (mark && !texts.has(mark)) mark = mark.parentElement?.closest("g") ?? null;
    tip.hidden = !mark || !texts.get(mark);
    if (tip.hidden) return;
    tip.textContent = texts.get(mark);
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${event.clientY + tip.offsetHeight + 22 > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  });

  // Where the lanes of a timeline are, and what each zoom moves; a view that is hidden has no places yet.
  const prepared = (svg) => {
    if (svg.timeline) return svg.timeline;
    const lanes = svg.querySelector("[id$=patch_2] path").getBBox(); // the background of the axes
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const cover = document.createElementNS(SVG, "rect");
    cover.setAttribute("class", "cover");
    cover.setAttribute("height", height);
    const every = [...svg.querySelectorAll("text")].map((text) => [text, Number(text.getAttribute("x"))]);
    svg.append(cover, ...every.filter(([, x]) => x < lanes.x).map(([text]) => text));
    svg.timeline = { left: lanes.x, right: lanes.x + lanes.width, width, height, every, cover, from: 0, to: 1 };
    return svg.timeline;
  };

  // Shows a timeline from one share of its step to another. The names of its lanes stay where they are, and no text is
  // stretched.
  const show = (svg, from, to) => {
    const { left, right, width, height, every, cover } = prepared(svg);
    const scale = to - from;
    const start = left + from * (right - left) - left * scale;
    svg.setAttribute("viewBox", `${start} 0 ${width * scale} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    for (const [text, x] of every) {
      const place = x < left ? start + x * scale : x;
      text.setAttribute("transform", `translate(${place} 0) scale(${scale} 1) translate(${-x} 0)`);
    }
    cover.setAttribute("x", start);
    cover.setAttribute("width", left * scale);
    Object.assign(svg.timeline, { from, to });
  };

  for (const svg of document.querySelectorAll("#timeline-figure svg")) {
    let began = null;
    const at = (event) => {
      const { left, right, width, from, to } = prepared(svg);
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      return Math.min(Math.max(from + ((x - left) / (right - left)) * (to - from), from), to);
    };
    svg.addEventListener("dblclick", () => show(svg, 0, 1));
    svg.addEventListener("mousedown", (event) => {
      if (innerWidth < NARROW) return; // a finger scrolls the page
      event.preventDefault();
      began = at(event);
    });
    addEventListener("mouseup", (event) => {
      if (began === null) return;
      const ends = [began, at(event)].sort((a, b) => a - b);
      began = null;
      if (ends[1] - ends[0] > 0.01 * (svg.timeline.to - svg.timeline.from)) show(svg, ...ends);
    });
  }
  document.documentElement.dataset.drawn = String(document.querySelectorAll("figure").length);
})();
