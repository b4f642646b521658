"use strict";
// Draws the embedded figures in the reader's colours and keeps their legends in step.
(() => {
  const data = JSON.parse(document.getElementById("figure-data").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = new Set();
  const hidden = new Set();
  const touch = matchMedia("(pointer: coarse)").matches;
  const buttons = [...document.querySelectorAll(".switch button")];
  let metric = "val_loss";

  const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Layout changes that give a figure the page's colours.
  const theme = (layout) => {
    const ink = cssColour("--ink"), grid = cssColour("--grid"), line = cssColour("--line");
    const change = { "font.color": ink, "hoverlabel.bgcolor": cssColour("--panel"), "hoverlabel.bordercolor": line };
    change["hoverlabel.font.color"] = ink;
    Object.assign(change, { "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": line, "modebar.activecolor": cssColour("--soft") });
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      change[`${axis}.gridcolor`] = grid;
      change[`${axis}.zerolinecolor`] = grid;
      change[`${axis}.linecolor`] = line;
    }
    return change;
  };

  const setDeep = (target, changes) => {
    for (const [path, value] of Object.entries(changes)) {
      const keys = path.split(".");
      const last = keys.pop();
      keys.reduce((node, key) => (node[key] = node[key] || {}), target)[last] = value;
    }
  };

  // A cell without validation rows shows its training loss whatever the switch says.
  const available = (figure) => {
    const names = new Set(figure.data.map((trace) => trace.meta && trace.meta.metric));
    return names.has(metric) ? metric : [...names][0];
  };

  const apply = (element) => {
    if (!element.layout || !element.layout.meta) return;
    const shown = available(element);
    const visible = element.data.map((trace) => {
      if (trace.meta.metric !== shown) return false;
      return hidden.has(trace.meta.arm) ? "legendonly" : true;
    });
    const range = element.layout.meta.ranges[shown];
    Plotly.update(element, { visible }, range ? { "yaxis.range": range } : { "yaxis.autorange": true });
  };

  const draw = (element) => {
    if (drawn.has(element)) return;
    drawn.add(element);
    const figure = data[element.dataset.figure];
    setDeep(figure.layout, theme(figure.layout));
    figure.layout.dragmode = touch ? false : "zoom";
    // The library would offer to upload a chart to its maker: nothing here may leave the page.
    const config = {
      displayModeBar: touch ? false : "hover", showSendToCloud: false, plotlyServerURL: "",
      displaylogo: false, scrollZoom: false, showTips: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: element.dataset.figure, scale: 2 },
    };
    Plotly.newPlot(element, figure.data, figure.layout, config).then(() => {
      new ResizeObserver(() => Plotly.Plots.resize(element)).observe(element);
      if (!figure.layout.meta) return;
      apply(element);
      element.on("plotly_legendclick", (event) => {
        const arm = event.data[event.curveNumber].meta.arm;
        if (!hidden.delete(arm)) hidden.add(arm);
        drawn.forEach(apply);
        return false;
      });
      element.on("plotly_legenddoubleclick", () => false);
    });
  };

  for (const button of buttons) {
    button.addEventListener("click", () => {
      metric = button.dataset.metric;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      drawn.forEach(apply);
    });
  }

  // Figures far below the fold wait until they are near, so that a page with many cells opens fast.
  if (plots.length > 12 && "IntersectionObserver" in window) {
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        observer.unobserve(entry.target);
        draw(entry.target);
      }
    }, { rootMargin: "1200px" });
    plots.forEach((element) => observer.observe(element));
  } else {
    plots.forEach(draw);
  }

  const recolour = () => drawn.forEach((element) => Plotly.relayout(element, theme(element.layout)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => { plots.forEach(draw); recolour(); });
  addEventListener("afterprint", recolour);

  const filter = document.getElementById("run-filter");
  if (filter) {
    const rows = [...document.querySelectorAll("#run-table tbody tr")];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, place) => { row.hidden = !words.every((word) => texts[place].includes(word)); });
    });
  }
})();
