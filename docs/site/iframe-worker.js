// Search from the disk: browsers start no worker on a page of file://, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.answer(data);
      const script = inner.document.createElement("script");
      script.src = url;
      this.ready = new Promise((done) => (script.onload = () => done(inner)));
      inner.document.body.append(script);
    }
    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then((inner) => {
        const event = new MessageEvent("message", { data });
        inner.dispatchEvent(event);
      });
    }
    terminate() {}
  };
}
