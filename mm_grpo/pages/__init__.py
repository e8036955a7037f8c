"""HTML pages of a run and of `mm-grpo check --page`, each a single file.

    page            HTML of both: data as inert JSON, images, and page.css and page.js, which draw everything
    report          page of one or several runs: report.html, view.html
    curves          metrics of a run in a limited number of points
    gallery         groups and evaluation rows of a run, chosen by a budget
    check_page      page of a check: the first rows as the model sees them

Python chooses and limits the data of a page; page.js draws it, with all words and colours. To show more: add it to the
data of report.py or check_page.py, and draw it in page.js.
"""
