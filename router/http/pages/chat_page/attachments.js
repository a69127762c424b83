"use strict";
// The images that go with the next message. What the server would refuse is refused here, before it is sent.

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const asSize = bytes => (bytes < 2 ** 20 ? `${Math.ceil(bytes / 1024)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`);

function readAsUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
// Why a file is not taken, empty if it is. `limits`: the model's `image_limits`; `earlier`: the files that a request
// would have beside it, those of the conversation so far among them.
async function refusalOf(file, limits, earlier) {
  if (!IMAGE_TYPES.includes(file.type)) return `${file.name}: only PNG, JPEG, WebP and GIF images are taken`;
  if (!limits) return `${file.name}: this model takes no images`;
  if (earlier.length >= limits.max_images) {
    return `${file.name}: a conversation has at most ${limits.max_images} images here; begin a new chat for more`;
  }
  const bytes = earlier.reduce((sum, one) => sum + one.size, file.size);
  if (bytes > limits.max_image_bytes) {
    return `${file.name}: the conversation's images would have ${asSize(bytes)}, of at most ${asSize(limits.max_image_bytes)}`;
  }
  try {
    const {width, height} = await createImageBitmap(file);
    if (width * height > limits.max_image_pixels) {
      return `${file.name}: has ${width} × ${height} pixels; at most ${limits.max_image_pixels} pixels are taken`;
    }
  } catch {
    return `${file.name}: is damaged, or no image`;
  }
  return "";
}

class Attachments {
  // `list` shows the files, `note` why some were refused.
  constructor(list, note) {
    this.files = [];
    this.list = list;
    this.note = note;
  }
  async add(files, limits, earlier) {
    const refused = [];
    for (const file of files) {
      const reason = await refusalOf(file, limits, [...earlier, ...this.files]);
      if (reason) refused.push(reason);
      else this.files.push({name: file.name || "image", type: file.type, size: file.size, url: await readAsUrl(file)});
    }
    this.show(refused.join("\n"));
  }
  take() {
    const files = this.files;
    this.files = [];
    this.show("");
    return files;
  }
  show(refused) {
    this.note.textContent = refused;
    this.list.replaceChildren(...this.files.map(file => {
      const part = element("span", "attached");
      part.append(thumbnail(file), button("×", `Remove ${file.name}`, () => {
        this.files = this.files.filter(one => one !== file);
        this.show("");
      }));
      part.lastChild.setAttribute("aria-label", `Remove ${file.name}`);
      return part;
    }));
  }
}
function thumbnail(file) {
  const image = element("img");
  // A file is shown from its own bytes: the page's policy loads no image from elsewhere.
  image.src = file.url;
  image.alt = file.name;
  image.title = `${file.name}, ${asSize(file.size)}`;
  return image;
}
