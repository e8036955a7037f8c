// Browsers refuse workers to pages that are files; there the worker of the search runs in a frame that is not shown.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${script}"></script>`;
      this.inside = new Promise((loaded) => {
        frame.onload = () => loaded(frame.contentWindow);
      });
      this.inside.then((inside) => {
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
