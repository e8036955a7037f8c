"""The two pages that mm_grpo writes, each one file that needs nothing else: of a run, and of `mm-grpo check --page`.

    page            the shell of both: data as inert JSON, pictures, and page.css and page.js, which draw everything
    report          the page of one or several runs: report.html, view.html
    curves          the metrics that it draws, in a bounded number of points
    gallery         its groups and evaluation rows, chosen by a budget, with the sight of their tokens
    check_page      the page of a check: what the model sees of the first rows

Python chooses and bounds what a page shows; every word and colour around it is page.js's. To show more: put it into the
data of report.py or check_page.py, and draw it in page.js.
"""
