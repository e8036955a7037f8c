"""Data: from whatever holds the rows to samples, in an order that a seed decides.

    sources   a path, a list, a datasets.Dataset or a mapping → a dataset (`load`)
    dataset   rows by index, each read as a `Sample` when it is asked for
    layouts   one row → messages, image sources and columns
    images    one image source → an upright RGB picture within the limits
    jsonl     rows written to a file, with their images beside it
    order     which rows fill the slots of a step: a pure function of the seed and the epoch
    fingerprint  what tells one dataset from another
    sets      which rows a config trains on and is evaluated on
    shapes    a task whose images are drawn, without any download

Not here: what a sample becomes for a model (processors/). Importing this loads neither torch nor the
datasets library.
"""

from mm_grpo.data.dataset import Dataset, DataSettings
from mm_grpo.data.images import open_image
from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sources import TASKS, load

__all__ = ["TASKS", "DataSettings", "Dataset", "PromptOrder", "load", "open_image", "write_jsonl"]
