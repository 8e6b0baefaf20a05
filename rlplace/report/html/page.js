"use strict";
// Draws the figures in the page's colours, and again whenever the reader changes between light and dark.
(() => {
  const NARROW = 640;
  const styles = getComputedStyle(document.documentElement);
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const chosen = new Map();
  document.documentElement.classList.add("with-script");

  const color = (name) => styles.getPropertyValue(`--${name}`).trim();
  const NAMES = { "@ink": "ink", "@faint": "faint", "@grid": "grid", "@card": "card", "@accent": "accent" };
  const coloured = (value) => {
    if (typeof value === "string") return Object.hasOwn(NAMES, value) ? color(NAMES[value]) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
  };

  const shared = () => ({
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 12 },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 }, align: "left" },
  });

  const set = (target, path, value) => {
    const keys = path.split(".");
    const last = keys.pop();
    let place = target;
    for (const key of keys) place = place[key] ??= {};
    place[last] = value;
  };

  // The traces and the layout of a figure as the chosen variant has them.
  const spec = (figure) => {
    const { data, layout } = structuredClone({ data: figure.data, layout: figure.layout });
    const variant = figure.variants[chosen.get(figure.id) ?? 0];
    for (const [path, values] of Object.entries(variant?.restyle ?? {})) {
      values.forEach((value, index) => set(data[index], path, value));
    }
    for (const [path, value] of Object.entries(variant?.relayout ?? {})) set(layout, path, value);
    const own = { ...shared(), ...coloured(layout) };
    own.hoverlabel = shared().hoverlabel;
    if (window.innerWidth < NARROW) own.dragmode = false; // a finger scrolls the page
    own.transition = { duration: 0 };
    return [coloured(data), own];
  };

  const options = {
    responsive: true,
    displaylogo: false,
    displayModeBar: false,
    showTips: false,
    doubleClick: "reset",
  };

  const draw = (figure) => {
    const place = document.querySelector(`#${figure.id} .plot`);
    const [data, layout] = spec(figure);
    return Plotly.react(place, data, layout, options).then(() => {
      place.dataset.drawn = "yes";
    });
  };

  const key = ([name, tint]) => {
    const item = document.createElement("span");
    const patch = document.createElement("i");
    patch.style.background = coloured(tint);
    item.className = "key";
    item.append(patch, name);
    return item;
  };

  const controls = (figure) => {
    const box = document.querySelector(`#${figure.id} .controls`);
    const number = chosen.get(figure.id) ?? 0;
    box.replaceChildren();
    if (figure.variants.length > 1) {
      const choices = document.createElement("span");
      choices.className = "choices";
      figure.variants.forEach((variant, index) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = variant.label;
        button.setAttribute("aria-pressed", String(index === number));
        button.addEventListener("click", () => {
          chosen.set(figure.id, index);
          controls(figure);
          draw(figure);
        });
        choices.append(button);
      });
      box.append(choices);
    }
    box.append(...(figure.variants[number]?.legend ?? []).map(key));
  };

  const drawAll = async () => {
    for (const figure of figures) {
      controls(figure);
      await draw(figure);
    }
    document.documentElement.dataset.drawn = String(figures.length);
  };

  dark.addEventListener("change", drawAll);
  drawAll();
})();
