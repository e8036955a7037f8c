"""Data: from whatever holds the rows to samples, in an order that a seed decides.

    sources   paths, a list, a datasets.Dataset or a mapping → `Rows` (`load`); the rows of a config
    paths     what a string names: files, folders of shards, globs, a hub's dataset
    readers   the rows of what was found, one source after the other; CSV
    jsonl     rows in JSON files: read, and written with their images in a folder
    hf_datasets   rows that the datasets library reads: Parquet, Arrow, saved datasets, the hub
    base      `Rows`: what the rows of one source and of several can do; each is read as a `Sample` when asked for
    dataset   the rows of one source
    blind     rows with the images of other rows, or without any: what a model scores that cannot see
    columns   names of columns: ours and the dataset's, nested ones; names and values in messages
    layouts   the columns of prompt and answer in the rows of several ecosystems
    rows      one row → messages, sources of images and videos, and columns
    row_settings   what one row sets: limits of its images, what is shown of videos, arguments of the chat template
    media_columns   images and videos that nothing would read: columns, placeholders
    media_check     datasets that would be trained on without them
    image_files     rows whose images cannot be read: refused or left out before a model is loaded
    images    one image source → an upright RGB picture within the limits
    videos      one video source → a few frames with their times, within the limits
    fingerprint digests of rows, by which a resumed run notices that its data changed
    file_states files that must stay as they are while a run reads them
    mixture   several sources as one dataset, each with its weight and settings
    mixture_order   which rows of which source fill the slots of a step
    order     which rows fill the slots of a step: a pure function of the seed and the epoch
    pass_rate_order   the same, but rows near a pass rate of one half come more often
    shapes    a task whose images are drawn, without any download
    recipe_prepare   a dataset of the hub written to disk by a recipe's prepare.py

Not here: what a sample becomes for a model (processors/). Importing this loads neither torch nor the
datasets library.
"""

from mm_grpo.data.base import Rows
from mm_grpo.data.dataset import Dataset
from mm_grpo.data.images import open_image
from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sources import TASKS, load

__all__ = ["TASKS", "Dataset", "Mixture", "PromptOrder", "Rows", "load", "open_image", "write_jsonl"]
